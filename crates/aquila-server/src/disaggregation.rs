//! Requests that two workers serve: one processes the prompt, the other decodes.
//!
//! A router sends the same body to both, with the host and port of the prefill worker and a room,
//! the name under which both know the request. A body with several answers has one room for all, or
//! a list; from one room, those of the answers are counted up.

use std::sync::Arc;

use aquila_disagg::{DecodeWorker, PeerCounts, PrefillAddress, PrefillWorker, Room};
use aquila_engine::{RequestId, Snapshot, Transfer};
use axum::response::Response;
use serde_json::json;

use crate::fields::{Fields, OneOrMany};
use crate::metrics::{Page, escaped};
use crate::refusal::Refusal;
use crate::routes::json as respond;
use crate::state::App;
use crate::submit::Submission;

/// Bytes of the longest name of a host.
const LONGEST_HOST: usize = 255;

/// This server's part in requests that two workers serve.
#[derive(Clone)]
pub enum Role {
    /// The worker processes prompts.
    Prefill(Arc<PrefillWorker>),
    /// The worker decodes.
    Decode(Arc<DecodeWorker>),
}

impl std::fmt::Debug for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Role {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Prefill(_) => "prefill",
            Self::Decode(_) => "decode",
        }
    }
}

impl Role {
    /// What went from worker to worker, by the other one.
    pub(crate) fn write_metrics(&self, page: &mut Page, engine: &Snapshot) {
        let (peers, rooms) = match self {
            Self::Prefill(worker) => (worker.peers(), Some(worker.load())),
            Self::Decode(worker) => (worker.peers(), None),
        };
        let counts = peers.snapshot();
        type Count = fn(&PeerCounts) -> f64;
        let of_peers: [(&str, &str, Count); 5] = [
            ("transfers", "Requests whose rows were transferred", |c| c.transfers as f64),
            ("transfer_failures", "Requests of which that failed", |c| c.failures as f64),
            ("transfer_bytes", "Bytes that were transferred", |c| c.bytes as f64),
            ("transfer_wait_seconds", "From the claim of a request to its first rows", |c| {
                c.waited.as_secs_f64()
            }),
            ("transfer_seconds", "From the first rows of a request to its last", |c| {
                c.transferred.as_secs_f64()
            }),
        ];
        for (name, help, count) in of_peers {
            let name = format!("aquila:{name}_total");
            page.head(&name, "counter", help);
            for (peer, counts) in &counts {
                page.line(&name, &format!(",peer=\"{}\"", escaped(peer)), count(counts));
            }
        }
        for (name, help, value) in [
            ("transfer_strangers", "Connections dropped in their handshake", peers.strangers()),
            ("handed_over", "Requests handed over to decode workers", engine.handed_over),
            ("received", "Requests received from prefill workers", engine.received),
            (
                "rebuilt_drafts",
                "Received requests whose draft ran its last rows again",
                engine.rebuilt_drafts,
            ),
            (
                "lost_drafts",
                "Received requests decoded plainly, without rows of the draft",
                engine.lost_drafts,
            ),
        ] {
            page.single(&format!("aquila:{name}_total"), "counter", help, value as f64);
        }
        let Some((rooms, unsent)) = rooms else { return };
        page.single("aquila:transfer_rooms", "gauge", "Requests not yet transferred", rooms as f64);
        let help = "Bytes that wait to be sent";
        page.single("aquila:transfer_unsent_bytes", "gauge", help, unsent as f64);
    }
}

/// What a body says of the other worker.
#[derive(Debug, Clone, Default)]
pub(crate) struct Bootstrap {
    host: Option<OneOrMany<Option<String>>>,
    port: Option<OneOrMany<Option<u16>>>,
    room: Option<OneOrMany<Option<u64>>>,
}

impl Bootstrap {
    pub fn take(fields: &mut Fields) -> Result<Self, Refusal> {
        let host: Option<OneOrMany<Option<String>>> = fields.take("bootstrap_host")?;
        let hosts = match &host {
            None => &[],
            Some(OneOrMany::One(host)) => std::slice::from_ref(host),
            Some(OneOrMany::Many(hosts)) => hosts.as_slice(),
        };
        if hosts.iter().flatten().any(|host| host.len() > LONGEST_HOST) {
            let why = format!("a name of a host has at most {LONGEST_HOST} bytes");
            return Err(Refusal::param("bootstrap_host", why));
        }
        Ok(Self {
            host,
            port: fields.take("bootstrap_port")?,
            room: fields.take("bootstrap_room")?,
        })
    }

    /// Notes the prefill worker of each answer. Where this server has no role, it does all of a
    /// request, whatever a router says.
    pub fn assign(self, app: &App, submissions: &mut [Submission]) -> Result<(), Refusal> {
        let Self { host, port, room } = self;
        let Some(role) = &app.settings.role else { return Ok(()) };
        let missing = || {
            let why = format!("is missing: this is a {} worker, behind a router", role.name());
            Refusal::param("bootstrap_room", why)
        };
        let count: usize = submissions.iter().map(Submission::answers).sum();
        let rooms: Vec<u64> = match room.ok_or_else(missing)? {
            OneOrMany::One(room) => {
                let first = room.ok_or_else(missing)?;
                (0..count as u64).map(|answer| first.wrapping_add(answer)).collect()
            }
            OneOrMany::Many(rooms) => {
                let rooms: Option<Vec<u64>> = rooms.into_iter().collect();
                let rooms = rooms.ok_or_else(missing)?;
                match rooms.len() {
                    given if given == count => rooms,
                    // One for each prompt, each with several answers.
                    given if given == submissions.len() => {
                        let of_prompt =
                            submissions.iter().zip(rooms).flat_map(|(submission, room)| {
                                (0..u64::from(submission.params.n))
                                    .map(move |n| room.wrapping_add(n))
                            });
                        of_prompt.collect()
                    }
                    given => {
                        let why = format!("has {given} rooms for {count} answers");
                        return Err(Refusal::param("bootstrap_room", why));
                    }
                }
            }
        };
        let hosts = each(host, count, "bootstrap_host")?;
        let ports = each(port, count, "bootstrap_port")?;
        let mut all = rooms.into_iter().zip(hosts).zip(ports).map(|((room, host), port)| {
            PrefillAddress { host: host.unwrap_or_else(|| "127.0.0.1".into()), port, room }
        });
        for submission in submissions {
            submission.prefill = all.by_ref().take(submission.answers()).collect();
        }
        Ok(())
    }
}

/// One value for each answer: the same for all, or a list that is as long.
fn each<T: Clone>(
    values: Option<OneOrMany<Option<T>>>,
    count: usize,
    name: &str,
) -> Result<Vec<Option<T>>, Refusal> {
    match values {
        None => Ok(vec![None; count]),
        Some(OneOrMany::One(value)) => Ok(vec![value; count]),
        Some(OneOrMany::Many(values)) if values.len() == count => Ok(values),
        // Chat bodies have a list for each answer, others for each prompt: the first is as good.
        Some(OneOrMany::Many(values)) => match values.first() {
            Some(first) => Ok(vec![first.clone(); count]),
            None => Err(Refusal::param(name, "must not be an empty list")),
        },
    }
}

/// The parts of other workers in the answers to one prompt, while they are submitted.
pub(crate) struct Transfers<'a> {
    role: Option<&'a Role>,
    transfers: Vec<Transfer>,
    rooms: Vec<(u64, Arc<Room>)>,
}

impl<'a> Transfers<'a> {
    /// Opens the rooms of a prefill worker, or prepares to claim those of another one.
    pub fn open(app: &'a App, addresses: &[PrefillAddress]) -> Result<Self, Refusal> {
        let role = app.settings.role.as_ref();
        let mut all = Self { role, transfers: Vec::new(), rooms: Vec::new() };
        for address in addresses {
            let transfer = match role {
                Some(Role::Prefill(worker)) => worker.open(address.room).map(|room| {
                    all.rooms.push((address.room, room.clone()));
                    Transfer::HandOver(room)
                }),
                Some(Role::Decode(worker)) => worker.source(address).map(Transfer::Receive),
                None => Ok(Transfer::None),
            };
            match transfer {
                Ok(transfer) => all.transfers.push(transfer),
                Err(error) => {
                    let param = match role {
                        Some(Role::Decode(_)) => "bootstrap_host",
                        _ => "bootstrap_room",
                    };
                    all.close();
                    return Err(Refusal::param(param, error));
                }
            }
        }
        // Taken from the end.
        all.transfers.reverse();
        Ok(all)
    }

    /// The transfer of the next answer.
    pub fn next(&mut self) -> Transfer {
        self.transfers.pop().unwrap_or_default()
    }

    /// The answers are these requests of the engine.
    pub fn admitted(self, ids: &[RequestId]) {
        for ((_, room), &id) in self.rooms.iter().zip(ids) {
            room.admitted(id);
        }
    }

    /// Closes the rooms of answers that were not submitted.
    pub fn close(self) {
        let Some(Role::Prefill(worker)) = self.role else { return };
        for (number, _) in &self.rooms {
            worker.close(*number);
        }
    }
}

impl App {
    /// Whether prompts are processed here and answers decoded elsewhere.
    pub fn hands_over(&self) -> bool {
        matches!(self.settings.role, Some(Role::Prefill(_)))
    }

    /// Processes prompts for another worker. A router waits for the end of this answer and throws
    /// it away, so it is short, whatever was asked for.
    pub async fn hand_over(
        &self,
        submissions: Vec<Submission>,
        param: &str,
    ) -> Result<Response, Refusal> {
        let name = submissions[0].name.clone();
        let answers = self.submit_whole(submissions, param).await?.list;
        let prompt: usize = answers.iter().map(|answer| answer.usage.prompt_tokens).sum();
        let cached: usize = answers.iter().map(|answer| answer.usage.cached_tokens).sum();
        let answer = json!({
            "id": name,
            "object": "prefill",
            "usage": {
                "prompt_tokens": prompt,
                "prompt_tokens_details": { "cached_tokens": cached },
            },
        });
        Ok(respond(&answer, Some(&name)))
    }
}
