//! Workers over real sockets: texts are those of one engine, and whatever goes wrong ends in a
//! clear reason on both sides, with no slot lost.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::Receiver;
use std::time::Duration;

use aquila_compute::round::HostRows;
use aquila_disagg::{Error, Link, Message, PrefillAddress, Secret, Tcp, Transport};
use aquila_engine::{Claim, FinishReason, HandOver, KvRows, Prefilled, TokenRows};

use crate::support::*;

fn ended(answer: &Receiver<Answer>) -> Answer {
    answer.recv_timeout(PATIENCE).expect("a request ends")
}

/// Why a request was given up.
fn why(answer: &Receiver<Answer>) -> String {
    match ended(answer).outcome.reason {
        FinishReason::Abort(why) => why,
        other => panic!("it should have failed: {other:?}"),
    }
}

#[test]
fn texts_and_drafts_are_those_of_one_engine() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    let port = prefill.worker.port();
    let submit = |index: usize| {
        let room = (1 << 62) + index as u64;
        // A room is opened before it is claimed, or after.
        let before = (!index.is_multiple_of(3)).then(|| prefill.submit(index, room));
        let answer = decode.submit(index, port, room);
        (before.unwrap_or_else(|| prefill.submit(index, room)), answer)
    };
    let all: Vec<_> = (0..12).map(submit).collect();
    for (index, (wanted, (first, got))) in alone(12).iter().zip(&all).enumerate() {
        assert_eq!(ended(first).outcome.reason, FinishReason::Length, "request {index}");
        let got = ended(got);
        assert_eq!(got.tokens, wanted.tokens, "request {index}");
        assert_eq!(got.outcome.usage.spec, wanted.outcome.usage.spec, "request {index}");
    }
    for engine in [&prefill.engine, &decode.engine] {
        no_slot_is_lost(engine);
    }
    for peers in [prefill.worker.peers(), decode.worker.peers()] {
        let counts = peers.snapshot();
        let [(_, counts)] = &counts[..] else { panic!("one peer, not {counts:?}") };
        assert_eq!((counts.transfers, counts.failures, peers.strangers()), (12, 0, 0));
        assert!(counts.bytes > 100_000, "{counts:?}");
    }
    assert_eq!(prefill.worker.load(), (0, 0));
}

#[test]
fn a_room_is_opened_once_and_claimed_once() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    let port = prefill.worker.port();
    let first = prefill.submit(8, 5);
    assert!(matches!(prefill.worker.open(5), Err(Error::Room { room: 5, .. })));
    let (one, two) = (decode.submit(8, port, 5), decode.submit(8, port, 5));
    let reasons = [ended(&one), ended(&two)].map(|answer| answer.outcome.reason);
    let failed: Vec<_> =
        reasons.iter().filter(|reason| matches!(reason, FinishReason::Abort(_))).collect();
    assert_eq!(failed.len(), 1, "{reasons:?}");
    ended(&first);
    for engine in [&prefill.engine, &decode.engine] {
        no_slot_is_lost(engine);
    }
}

#[test]
fn a_room_that_nobody_claims_or_opens_expires() {
    let short = Duration::from_millis(200);
    let prefill = prefill_with(Secret::default(), identity(), short);
    let unclaimed = prefill.submit(3, 1);
    assert!(matches!(ended(&unclaimed).outcome.reason, FinishReason::Abort(_)));
    let decode = Decode::new();
    let unopened = decode.submit(3, prefill.worker.port(), 2);
    let why = why(&unopened);
    assert!(why.contains("room") || why.contains("no request has opened it"), "{why}");
    for engine in [&prefill.engine, &decode.engine] {
        no_slot_is_lost(engine);
    }
    assert_eq!(prefill.worker.load(), (0, 0));
}

#[test]
fn workers_that_do_not_fit_say_why() {
    let secret = |text: &str| Secret::new(text.as_bytes());
    let none = Secret::default;
    let other = identity().with("KV dtype", "bfloat16");
    for (of_prefill, of_decode, identity_of_decode, wanted) in [
        (secret("a"), secret("b"), identity(), "the shared secrets differ"),
        (secret("a"), none(), identity(), "has a shared secret"),
        (none(), secret("b"), identity(), "has a shared secret"),
        (secret("a"), secret("a"), other, "the KV dtype is bfloat16 here and none there"),
    ] {
        let prefill = prefill_with(of_prefill, identity(), PATIENCE);
        let decode = decode_with(of_decode, identity_of_decode);
        let why = why(&decode.submit(1, prefill.worker.port(), 9));
        assert!(why.contains(wanted), "{why}");
        assert_eq!(decode.worker.peers().strangers(), 1);
        no_slot_is_lost(&decode.engine);
    }
}

#[test]
fn a_host_that_nobody_named_is_not_connected_to() {
    let address = |host: &str| PrefillAddress { host: host.into(), port: None, room: 1 };
    let decode = Decode::new();
    let error = decode.worker.source(&address("192.0.2.1")).err().unwrap().to_string();
    assert!(error.contains("192.0.2.1 is not a prefill host"), "{error}");
    assert!(decode.worker.source(&address("[::1]")).is_ok());
    let known = decode_with(Secret::new(b"a"), identity());
    assert!(known.worker.source(&address("192.0.2.1")).is_ok());
}

#[test]
fn strangers_are_dropped_and_counted() {
    let prefill = Prefill::new();
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], b"AQ\x01\x05"] {
        let mut socket = TcpStream::connect(("127.0.0.1", prefill.worker.port())).unwrap();
        let mut answer = Vec::new();
        // A connection that is dropped with bytes unread is reset, maybe before all were sent.
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let _ = socket.read_to_end(&mut answer);
        assert!(answer.is_empty(), "nothing is said to a stranger");
    }
    while prefill.worker.peers().strangers() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    // It serves those who speak the protocol.
    let decode = Decode::new();
    prefill.submit(1, 1);
    let answer = ended(&decode.submit(1, prefill.worker.port(), 1));
    assert_eq!(answer.tokens, alone(2)[1].tokens);
}

/// A prefill worker that greets as one should, then says this; answers its port.
fn impostor(then: &'static [u8]) -> u16 {
    let accept = Tcp.listen("127.0.0.1:0").unwrap();
    let port = accept.port();
    std::thread::spawn(move || {
        while let Some(mut link) = accept.accept() {
            let mut converse = || {
                link.receive(1 << 10, PATIENCE)?;
                link.send(&Message::Welcome { nonce: [7; 16], proof: Vec::new() })?;
                link.receive(1 << 10, PATIENCE)?;
                link.send(&Message::Ready { identity: identity() })?;
                link.receive(1 << 10, PATIENCE)?;
                let why = String::from_utf8_lossy(then).into_owned();
                link.send(&match then {
                    b"hello" => Message::Hello { nonce: [1; 16] },
                    b"rows" => Message::Rows(KvRows {
                        group: 0,
                        store: 0,
                        layers: 0..1,
                        rows: 0..3,
                        bytes: vec![1; 5],
                    }),
                    _ => Message::Failed(why),
                })
            };
            let _: Result<usize, Error> = converse();
        }
    });
    port
}

#[test]
fn a_prefill_worker_that_errs_fails_its_requests_alone() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    // It speaks something else from the beginning.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stranger = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let _ = socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    for (port, wanted) in [
        (stranger, "a message does not begin as one"),
        (impostor(b"hello"), "it should have sent rows"),
        (impostor(b"rows"), "5 bytes of store 0 of group 0, not"),
        (impostor(b"out of memory"), "gave the request up: out of memory"),
    ] {
        let failing = decode.submit(3, port, 1);
        prefill.submit(2, 2);
        let neighbour = decode.submit(2, prefill.worker.port(), 2);
        let why = why(&failing);
        assert!(why.contains(wanted), "{why}");
        assert_eq!(ended(&neighbour).tokens, alone(3)[2].tokens);
    }
    assert_eq!(decode.worker.peers().strangers(), 1, "one did not come to be a peer");
    no_slot_is_lost(&decode.engine);
}

#[test]
fn a_room_is_full_while_much_of_it_waits_to_be_sent() {
    let prefill = Prefill::new();
    let (slow, other) = (prefill.worker.open(1).unwrap(), prefill.worker.open(2).unwrap());
    assert!(slow.has_room());
    let bytes = vec![0; MOST_UNSENT + 1];
    slow.rows(KvRows { group: 0, store: 0, layers: 0..1, rows: 0..1, bytes });
    assert!(!slow.has_room());
    assert!(other.has_room(), "what waits there is not its own");
    assert_eq!(prefill.worker.load(), (2, MOST_UNSENT + 1));
    prefill.worker.close(1);
    assert_eq!(prefill.worker.load(), (1, 0));
    prefill.worker.close(2);
}

/// Forwards connections to a port, each up to so many bytes of what comes back.
fn cut_after(port: u16, bytes: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let there = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (mut from, mut to) = (socket.try_clone().unwrap(), there.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            std::thread::spawn(move || {
                let (mut some, mut socket) = ((&there).take(bytes as u64), socket);
                let _ = std::io::copy(&mut some, &mut socket);
                let _ = socket.shutdown(std::net::Shutdown::Both);
                let _ = there.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    here
}

#[test]
fn a_connection_that_is_cut_ends_the_request_on_both_sides() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    let wanted = alone(8);
    for (room, bytes) in [20, 150, 5_000, 60_000].into_iter().enumerate() {
        let port = cut_after(prefill.worker.port(), bytes);
        let (id, first) = prefill.submit_numbered(7, room as u64);
        let answer = decode.submit(7, port, room as u64);
        // Others do not notice.
        let other = 100 + room as u64;
        prefill.submit(6, other);
        let neighbour = decode.submit(6, prefill.worker.port(), other);
        assert_eq!(ended(&neighbour).tokens, wanted[6].tokens);
        let why = why(&answer);
        assert!(why.contains("not received") && why.contains("127.0.0.1"), "{why}");
        // A room that was not claimed before the cut waits for another decode worker.
        prefill.engine.abort(id);
        ended(&first);
    }
    no_slot_is_lost(&decode.engine);
    no_slot_is_lost(&prefill.engine);
}

#[test]
fn an_abort_on_the_decode_worker_ends_the_other_side_too() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    // The room is claimed, and its request has not come.
    let (mut request, answer) = request(4);
    let address =
        PrefillAddress { host: "127.0.0.1".into(), port: Some(prefill.worker.port()), room: 3 };
    request.transfer = aquila_engine::Transfer::Receive(decode.worker.source(&address).unwrap());
    let id = decode.engine.submit(request).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    decode.engine.abort(id);
    ended(&answer);
    no_slot_is_lost(&decode.engine);
    // A request that comes now can be claimed by another.
    prefill.submit(4, 4);
    let again = decode.submit(4, prefill.worker.port(), 4);
    assert_eq!(ended(&again).tokens, alone(5)[4].tokens);
}

/// Connects to a prefill worker as a decode worker does.
fn joined(prefill: &Prefill) -> Box<dyn Link> {
    let address = format!("127.0.0.1:{}", prefill.worker.port());
    let mut link = Tcp.connect(&address, PATIENCE).unwrap();
    link.send(&Message::Hello { nonce: [3; 16] }).unwrap();
    link.receive(1 << 10, PATIENCE).unwrap();
    link.send(&Message::Join { proof: Vec::new(), identity: identity() }).unwrap();
    link.receive(1 << 10, PATIENCE).unwrap();
    link
}

/// All messages of a room but those that say nothing.
fn messages(link: &mut dyn Link, room: u64) -> Vec<Message> {
    link.send(&Message::Claim { room, claim: Claim { have: 0, seed: 1, candidates: 1 } }).unwrap();
    let mut all = Vec::new();
    loop {
        let (message, _) = link.receive(256 << 20, PATIENCE).unwrap();
        let is_last = matches!(message, Message::Prefilled(_) | Message::Failed(_));
        all.extend((message != Message::Wait).then_some(message));
        if is_last {
            return all;
        }
    }
}

/// What a prompt leaves with so many rows of so many values, and with such a draft.
fn left(rows: usize, width: usize, draft: Vec<u8>) -> Prefilled {
    let values = (0..rows * width).map(|at| (at % 1_000_003) as f32).collect();
    let hidden_states = HostRows { width, values };
    let routed_experts = HostRows { width: 2, values: (0..2 * rows as u32).collect() };
    Prefilled {
        tokens: Vec::new(),
        ended: Some(FinishReason::Length),
        prompt: Vec::new(),
        rows: TokenRows { from: 3, hidden_states, routed_experts },
        groups: 1,
        cached_tokens: 0,
        draft: Some(draft),
    }
}

#[test]
fn rows_of_a_long_prompt_are_sent_in_pieces() {
    let prefill = Prefill::new();
    // 295 MB of hidden states: more than a message may have.
    let sent = left(9000, 8192, vec![7]);
    let room = prefill.worker.open(1).unwrap();
    room.prefilled(sent.clone());
    assert_eq!(prefill.worker.load(), (1, 4 * 9000 * (8192 + 2)));
    let mut link = joined(&prefill);
    let mut rows = TokenRows { from: 3, ..TokenRows::default() };
    let mut messages = messages(&mut *link, 1);
    let Some(Message::Prefilled(end)) = messages.pop() else { panic!("no end of the prompt") };
    assert_eq!(messages.len(), 9);
    for message in messages {
        let Message::Returned(piece) = message else { panic!("{message:?}") };
        assert_eq!(piece.from, 3);
        rows.hidden_states.extend(piece.hidden_states, 0);
        rows.routed_experts.extend(piece.routed_experts, 0);
    }
    assert!(rows == sent.rows, "all rows came, in their order");
    assert_eq!(*end, Prefilled { rows: TokenRows { from: 3, ..TokenRows::default() }, ..sent });
    prefill.worker.wait_for_transfers();
    assert_eq!(prefill.worker.load(), (0, 0));
}

#[test]
fn what_fits_into_no_message_is_refused_and_said() {
    let prefill = Prefill::new();
    prefill.worker.open(1).unwrap().prefilled(left(3, 4, vec![7; 256 << 20]));
    prefill.worker.open(2).unwrap().prefilled(left(0, 0, vec![7]));
    let mut link = joined(&prefill);
    let refused = messages(&mut *link, 1);
    let Some(Message::Failed(why)) = refused.last() else { panic!("it is too long") };
    assert!(why.contains("a message has at most 268435456"), "{why}");
    // The connection serves the next room.
    assert!(matches!(messages(&mut *link, 2)[..], [Message::Prefilled(_)]));
}

#[test]
fn hidden_states_of_prompts_are_those_of_one_engine() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    let engine = engine();
    let mut all = Vec::new();
    for index in 0..4 {
        let with_rows = |index| {
            let (mut request, answer) = request(index);
            request.returned.hidden_states = true;
            (request, answer)
        };
        let (alone, wanted) = with_rows(index);
        engine.submit(alone).unwrap();
        let (mut first, _) = with_rows(index);
        let open = prefill.worker.open(index as u64).unwrap();
        first.transfer = aquila_engine::Transfer::HandOver(open.clone());
        open.admitted(prefill.engine.submit(first).unwrap());
        let (mut second, got) = with_rows(index);
        let port = Some(prefill.worker.port());
        let address = PrefillAddress { host: "127.0.0.1".into(), port, room: index as u64 };
        second.transfer = aquila_engine::Transfer::Receive(decode.worker.source(&address).unwrap());
        decode.engine.submit(second).unwrap();
        all.push((wanted, got));
    }
    for (wanted, got) in &all {
        let (wanted, got) = (ended(wanted), ended(got));
        assert_eq!(got.tokens, wanted.tokens);
        assert!(!wanted.outcome.rows.hidden_states.is_empty());
        assert_eq!(got.outcome.rows, wanted.outcome.rows);
    }
}

#[test]
fn connections_of_prefill_workers_that_are_gone_are_dropped() {
    let (prefill, decode) = (Prefill::new(), Decode::new());
    // A worker behind one that forwards, which hangs up when told and waits for the end.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, forwarded) = (listener.local_addr().unwrap().port(), prefill.worker.port());
    let (hang_up, told) = std::sync::mpsc::channel::<()>();
    let (over, is_over) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let socket = listener.accept().unwrap().0;
        let there = TcpStream::connect(("127.0.0.1", forwarded)).unwrap();
        let (mut from, mut to) = (there.try_clone().unwrap(), socket.try_clone().unwrap());
        std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        let (mut from, mut to) = (socket.try_clone().unwrap(), there);
        let ends = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
        told.recv().unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        ends.join().unwrap().unwrap();
        over.send(()).unwrap();
    });
    prefill.submit(1, 1);
    ended(&decode.submit(1, port, 1));
    hang_up.send(()).unwrap();
    // Until the decode worker has seen that, and has put another connection back.
    for room in 2..100 {
        prefill.submit(1, room);
        ended(&decode.submit(1, forwarded, room));
        if is_over.try_recv().is_ok() {
            return;
        }
    }
    panic!("the connection is kept for ever");
}
