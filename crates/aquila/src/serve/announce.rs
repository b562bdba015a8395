//! What `aquila serve` says when it is ready.

use std::net::{IpAddr, SocketAddr};

use aquila_text::Tokenizer;
use serde_json::{Value, json};

use crate::notice::notice;

/// Which prompts a model can be asked with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prompts {
    /// Conversations, texts and token ids.
    Chat,
    /// Texts and token ids.
    Text,
    /// Token ids alone.
    Ids,
}

impl Prompts {
    /// What a model with this tokenizer takes.
    pub fn of(tokenizer: Option<&Tokenizer>) -> Self {
        match tokenizer {
            Some(tokenizer) if tokenizer.chat_template().is_some() => Self::Chat,
            Some(_) => Self::Text,
            None => Self::Ids,
        }
    }

    fn what(self) -> &'static str {
        match self {
            Self::Chat => "for any OpenAI client",
            Self::Text => {
                "without chat, since the model has no chat template: completions and /generate are \
                 served"
            }
            Self::Ids => {
                "for token ids alone, since the model has no tokenizer: /v1/completions and \
                 /generate are served with ids, and chat and texts are refused"
            }
        }
    }

    /// A route, and a body for it.
    fn example(self, model: &str) -> (&'static str, Value) {
        let question = "Tom has 3 apples and buys 4 more. How many?";
        match self {
            Self::Chat => {
                let messages = json!([{ "role": "user", "content": question }]);
                ("chat/completions", json!({ "model": model, "messages": messages }))
            }
            Self::Text => ("completions", json!({ "model": model, "prompt": question })),
            Self::Ids => ("completions", json!({ "model": model, "prompt": [1, 2, 3] })),
        }
    }
}

/// How a server is reached.
#[derive(Debug, Clone, Copy)]
pub struct Open {
    /// Whether clients speak TLS.
    pub tls: bool,
    /// Whether they need a key.
    pub key: bool,
    /// Whether browsers get a page.
    pub web_page: bool,
}

/// Says where the server is, what it serves, and how to try it.
pub fn announce(address: SocketAddr, open: Open, model: &str, prompts: Prompts) {
    // An address that means all of them is none that a client can use.
    let host = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => IpAddr::from([127, 0, 0, 1]),
        IpAddr::V6(_) => IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1]),
    };
    let Open { tls, key, web_page } = open;
    let scheme = if tls { "https" } else { "http" };
    let root = format!("{scheme}://{}", SocketAddr::new(host, address.port()));
    let url = format!("{root}/v1");
    let header = if key { " -H 'Authorization: Bearer KEY'" } else { "" };
    let (route, body) = prompts.example(model);
    let body = body.to_string().replace('\'', "'\\''");
    notice(format_args!("ready: {url} ({model}), {}; Ctrl-C ends. Try:", prompts.what()));
    notice(format_args!(
        "  curl {url}/{route}{header} -H 'Content-Type: application/json' -d '{body}'"
    ));
    if web_page {
        notice(format_args!("  in a browser: {root}/"));
    }
}
