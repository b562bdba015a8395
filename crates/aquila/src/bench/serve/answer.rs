//! One request, from the moment of sending to the end of its answer.
//!
//! Times are those at which bytes were received, taken before they are read. Sending begins with
//! opening a connection where none is idle, as in the clients of SGLang and vLLM.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::Method;
use hyper::header::CONTENT_TYPE;

use super::acceptance::SpecCounts;
use super::api::Backend;
use super::client::{Client, Exchange, broken};
use super::sse::Events;

/// A complete answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// From sending to the first text; none if the answer has no text.
    pub ttft: Option<Duration>,
    /// Between pieces of text, each of which may hold several tokens.
    pub itl: Vec<Duration>,
    /// From sending to the last piece.
    pub latency: Duration,
    /// Tokens of the prompt, where the server counts them.
    pub prompt_tokens: Option<u64>,
    /// Tokens of the answer.
    pub output_tokens: u64,
    /// Whether the server counted those; pieces of text are counted otherwise.
    pub counted: bool,
    /// What speculation did, where the server says so.
    pub spec: Option<SpecCounts>,
}

impl Answer {
    /// Time per output token: what came after the first one, spread over its tokens.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.latency.checked_sub(self.ttft?)?;
        (self.output_tokens > 1).then(|| after_first.div_f64((self.output_tokens - 1) as f64))
    }
}

/// Sends a request now and reads its answer; why there is none, otherwise.
pub async fn ask(client: &Client, backend: Backend, body: Vec<u8>) -> Result<Answer, String> {
    let sent = Instant::now();
    let exchange = client.send(Method::POST, backend.path(), body).await?;
    if !exchange.response.status().is_success() {
        return Err(client.refusal(exchange).await);
    }
    let kind = exchange.response.headers().get(CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !kind.starts_with("text/event-stream") {
        return Err(format!("the answer is no stream of events but {kind:?}"));
    }
    let mut reading =
        Reading { backend, sent, last: sent, ended: false, answer: Answer::default() };
    let exchange = reading.read(exchange).await?;
    client.keep(exchange);
    Ok(reading.answer)
}

struct Reading {
    backend: Backend,
    sent: Instant,
    /// When the last text came.
    last: Instant,
    /// Whether the answer has said that it ended.
    ended: bool,
    answer: Answer,
}

impl Reading {
    /// Reads to the end of the stream.
    async fn read(&mut self, mut exchange: Exchange) -> Result<Exchange, String> {
        let mut events = Events::default();
        let body = exchange.response.body_mut();
        while let Some(frame) = body.frame().await {
            let now = Instant::now();
            let Ok(bytes) = frame.map_err(|e| broken(&e))?.into_data() else { continue };
            events.push(&bytes);
            while let Some(event) = events.next()? {
                self.event(&event, now)?;
            }
        }
        if !self.ended {
            return Err("the stream ended before the answer did".into());
        }
        Ok(exchange)
    }

    fn event(&mut self, event: &[u8], now: Instant) -> Result<(), String> {
        if event.is_empty() {
            return Ok(());
        }
        if event == b"[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let answer = &mut self.answer;
        let piece = self.backend.piece(event, answer.output_tokens)?;
        if piece.has_text {
            match answer.ttft {
                None => answer.ttft = Some(now - self.sent),
                Some(_) => answer.itl.push(now - self.last),
            }
            self.last = now;
            if !answer.counted {
                answer.output_tokens += 1;
            }
        }
        if piece.of_answer {
            answer.latency = now - self.sent;
        }
        if let Some((prompt, output)) = piece.tokens {
            answer.prompt_tokens = Some(prompt);
            answer.output_tokens = output;
            answer.counted = true;
        }
        if piece.spec.is_some() {
            answer.spec = piece.spec;
        }
        self.ended |= piece.ends;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_per_output_token_leaves_the_first_out() {
        let ms = Duration::from_millis;
        let answer = Answer {
            ttft: Some(ms(200)),
            latency: ms(1100),
            output_tokens: 10,
            ..Answer::default()
        };
        assert_eq!(answer.tpot(), Some(ms(100)));
        assert_eq!(Answer { output_tokens: 1, ..answer.clone() }.tpot(), None);
        assert_eq!(Answer { ttft: None, ..answer }.tpot(), None);
    }

    #[test]
    fn pieces_of_several_tokens_make_one_gap_each() {
        let sent = Instant::now();
        let mut reading = Reading {
            backend: Backend::Completions,
            sent,
            last: sent,
            ended: false,
            answer: Answer::default(),
        };
        let ms = Duration::from_millis;
        for (at, event) in [
            (50, r#"{"choices": [{"text": "a b"}]}"#),
            (80, r#"{"choices": [{"text": ""}]}"#),
            (90, r#"{"choices": [{"text": "c d e"}]}"#),
            (95, r#"{"choices": [{"text": "", "finish_reason": "length"}]}"#),
            (99, r#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}"#),
            (99, "[DONE]"),
        ] {
            reading.event(event.as_bytes(), sent + ms(at)).unwrap();
        }
        let expected = Answer {
            ttft: Some(ms(50)),
            itl: vec![ms(40)],
            latency: ms(95),
            prompt_tokens: Some(7),
            output_tokens: 5,
            counted: true,
            spec: None,
        };
        assert!(reading.ended);
        assert_eq!(reading.answer, expected);
        // (95 - 50) / (5 - 1)
        assert_eq!(reading.answer.tpot(), Some(Duration::from_micros(11_250)));
    }
}
