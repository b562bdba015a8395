//! Spans of requests, as a collector gets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;

use aquila_server::{Settings, TraceEndpoint};
use serde_json::Value;

use crate::support::{Running, generator, settings};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const SPAN: &str = "b7ad6b7169203331";

fn serve(collector: &str) -> Running {
    let endpoint = TraceEndpoint::parse(&format!("http://{collector}"), "test");
    Running::start(generator(), Settings { traces: Some(endpoint.unwrap()), ..settings() })
}

/// The first `count` spans that a collector gets, and perhaps more.
fn collect(listener: &TcpListener, count: usize) -> Vec<Value> {
    let mut spans = Vec::new();
    while spans.len() < count {
        let mut socket = listener.accept().unwrap().0;
        let mut reader = BufReader::new(socket.try_clone().unwrap());
        let mut length = 0;
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!(line, "POST /v1/traces HTTP/1.1\r\n");
        while line != "\r\n" {
            line.clear();
            reader.read_line(&mut line).unwrap();
            if let Some(value) = line.strip_prefix("content-length: ") {
                length = value.trim().parse().unwrap();
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).unwrap();
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let resource = &body["resourceSpans"][0];
        assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "test");
        spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().iter().cloned());
    }
    spans
}

#[test]
fn every_request_is_a_span_of_its_callers_trace() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = serve(&listener.local_addr().unwrap().to_string());
    let ask = |path: &str, flags: &str| {
        let parent = format!("traceparent: 00-{TRACE}-{SPAN}-{flags}");
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{parent}\r\n\r\n");
        server.connect().send(&request).reply()
    };
    assert_eq!(ask("/v1/models/none", "01").status, 404);
    // Its caller does not record.
    assert_eq!(ask("/v1/models", "00").status, 200);
    let answer = server.post("/v1/completions", r#"{"prompt": "x", "max_tokens": 1}"#).ok();
    let spans = collect(&listener, 2);
    let attribute = |span: &Value, key: &str| {
        let mut all = span["attributes"].as_array().unwrap().iter();
        all.find(|attribute| attribute["key"] == key).map(|attribute| attribute["value"].clone())
    };
    let named = |name: &str| spans.iter().find(|span| span["name"] == name).unwrap();
    let child = named("GET /v1/models/{*name}");
    assert_eq!((&child["traceId"], &child["parentSpanId"]), (&TRACE.into(), &SPAN.into()));
    assert_eq!(attribute(child, "http.response.status_code").unwrap()["intValue"], "404");
    assert_eq!(attribute(child, "error.type").unwrap()["stringValue"], "model_not_found");
    let root = named("POST /v1/completions");
    assert_eq!((root["traceId"].as_str().unwrap().len(), &root["parentSpanId"]), (32, &"".into()));
    assert_eq!(root["spanId"].as_str().unwrap().len(), 16);
    assert_eq!(attribute(root, "http.request.id").unwrap()["stringValue"], answer["id"]);
    let time = |key: &str| root[key].as_str().unwrap().parse::<u128>().unwrap();
    assert!(time("startTimeUnixNano") < time("endTimeUnixNano"));
}

#[test]
fn a_collector_that_is_away_keeps_nobody_waiting() {
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut server = serve(&nowhere.to_string());
    for _ in 0..5 {
        assert_eq!(server.get("/v1/models").status, 200);
    }
    server.join();
}
