//! The page of metrics and the dashboard for Grafana, held to what real servers print.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::server::Served;

/// A metric: its type, and the labels that its series have beside the model's name.
#[derive(Debug, Clone, Default, PartialEq)]
struct Metric {
    kind: String,
    labels: BTreeSet<String>,
}

type Metrics = BTreeMap<String, Metric>;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The rows of the page's tables.
fn documented() -> Metrics {
    let mut metrics = Metrics::new();
    for line in page("metrics.md").lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, kind, labels, meaning] = cells[..] else { panic!("not four cells: {line}") };
        assert!(!meaning.is_empty(), "{name} has no meaning");
        let labels = labels.split(", ").filter(|label| !label.is_empty()).map(str::to_owned);
        let metric = Metric { kind: kind.to_owned(), labels: labels.collect() };
        let before = metrics.insert(name.trim_matches('`').to_owned(), metric);
        assert!(before.is_none(), "{name} is twice in the page");
    }
    metrics
}

/// What a server prints; labels of metrics without series are not known.
fn printed(served: &Served) -> Metrics {
    let (status, text) = served.get("/metrics");
    assert_eq!(status, 200);
    let mut metrics = Metrics::new();
    let mut last = String::new();
    for line in text.lines() {
        if let Some(declared) = line.strip_prefix("# TYPE ") {
            let (name, kind) = declared.split_once(' ').unwrap();
            metrics.entry(name.to_owned()).or_default().kind = kind.to_owned();
            last = name.to_owned();
        } else if !line.starts_with('#') {
            let (_, rest) = line.split_once('{').unwrap();
            let names = rest.split('"').step_by(2).filter_map(|part| part.strip_suffix('='));
            let names = names.map(|label| label.trim_start_matches(',').to_owned());
            let metric = metrics.get_mut(&last).unwrap();
            metric.labels.extend(names.filter(|label| label != "model_name"));
        }
    }
    metrics
}

fn real() -> Metrics {
    let started = |line: &str| Served::start(line).unwrap_or_else(|ran| panic!("{}", ran.stderr));
    let plain = started("--speculative-num-steps 3");
    let (status, answer) =
        plain.post("/v1/completions", r#"{"prompt": "fn main", "max_tokens": 9}"#);
    assert_eq!(status, 200, "{answer}");
    let prefill = "--disaggregation-mode prefill --disaggregation-bootstrap-port 0";
    let mut metrics = printed(&started(prefill));
    metrics.extend(printed(&plain));
    metrics
}

#[test]
fn the_page_has_the_metrics_that_servers_print() {
    let (documented, real) = (documented(), real());
    let names = |metrics: &Metrics| metrics.keys().cloned().collect::<BTreeSet<_>>();
    let (ours, theirs) = (names(&documented), names(&real));
    let missing: Vec<_> = theirs.difference(&ours).collect();
    let invented: Vec<_> = ours.difference(&theirs).collect();
    assert!(missing.is_empty(), "docs/metrics.md lacks {missing:?}");
    assert!(invented.is_empty(), "docs/metrics.md has {invented:?}, which no server prints");
    for (name, metric) in &real {
        assert_eq!(documented[name].kind, metric.kind, "{name}");
        if !metric.labels.is_empty() {
            assert_eq!(documented[name].labels, metric.labels, "{name}");
        }
    }
}

/// All strings under these keys, wherever they are.
fn strings<'a>(value: &'a Value, keys: &[&str], found: &mut Vec<&'a str>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| strings(value, keys, found)),
        Value::Object(entries) => {
            for (key, value) in entries {
                match value.as_str().filter(|_| keys.contains(&key.as_str())) {
                    Some(text) => found.push(text),
                    None => strings(value, keys, found),
                }
            }
        }
        _ => (),
    }
}

/// The metrics of a query, each with the labels that the query groups by.
fn queried(query: &str, known: &Metrics) -> Vec<String> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = query.split(|c| !word(c));
    let metrics = words.filter(|w| w.contains(':') || w.starts_with("process_"));
    let base = |name: &str| {
        let parts = ["_bucket", "_sum", "_count"].into_iter().filter_map(|p| name.strip_suffix(p));
        let histogram = |base: &&str| known.get(*base).is_some_and(|m| m.kind == "histogram");
        parts.into_iter().find(histogram).unwrap_or(name).to_owned()
    };
    metrics.map(base).collect()
}

#[test]
fn the_dashboard_asks_for_metrics_and_labels_that_exist() {
    let known = documented();
    let dashboard: Value = serde_json::from_str(&page("grafana-dashboard.json")).unwrap();
    let mut queries = Vec::new();
    strings(&dashboard["panels"], &["expr"], &mut queries);
    strings(&dashboard["templating"], &["query"], &mut queries);
    queries.retain(|query| *query != "prometheus");
    assert!(queries.len() > 20, "{}", queries.len());
    for query in queries {
        let metrics = queried(query, &known);
        assert!(!metrics.is_empty(), "{query}");
        for name in &metrics {
            assert!(known.contains_key(name), "{name} of the dashboard does not exist: {query}");
        }
        for by in query.split(" by (").skip(1) {
            let label = by.split(')').next().unwrap();
            let has = metrics.iter().any(|name| known[name].labels.contains(label));
            assert!(has, "no metric of {query} has the label {label}");
        }
    }
}
