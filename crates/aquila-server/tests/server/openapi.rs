//! The OpenAPI document: what it says of routes is what they do.

use serde_json::Value;

use crate::support::Running;

#[test]
fn documented_methods_are_served_and_no_others() {
    let server = Running::usual();
    let document = server.get("/openapi.json").ok();
    assert_eq!(document["info"]["version"], env!("CARGO_PKG_VERSION"));
    for (path, operations) in document["paths"].as_object().unwrap() {
        let path = path.replace("{id}", "x").replace("{name}", "tiny");
        for method in ["get", "post", "put", "delete"] {
            let head = format!(
                "{} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
                method.to_uppercase()
            );
            let status = server.connect().send(&head).reply().status;
            let documented = operations.get(method).is_some();
            assert_eq!(status != 405, documented, "{method} {path} was answered with {status}");
            assert!(status < 500, "{method} {path} was answered with {status}");
        }
    }
}

#[test]
fn references_of_the_document_lead_somewhere() {
    fn references<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| references(value, found));
            }
            Value::Array(values) => values.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }
    let document = Running::usual().get("/openapi.json").ok();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(!found.is_empty());
    for reference in found {
        assert!(document.pointer(&reference[1..]).is_some(), "{reference}");
    }
}
