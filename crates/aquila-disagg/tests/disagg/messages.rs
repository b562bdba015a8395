//! Messages: what is written is read, and whatever else comes is refused.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use aquila_compute::round::HostRows;
use aquila_disagg::{Error, Identity, Link, Message, Tcp, Transport};
use aquila_engine::{Claim, FinishReason, KvRows, Prefilled, StopCause, Token, TokenRows};
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(10);

/// A link and the bare socket at its other end.
fn link_and_socket() -> (Box<dyn Link>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let link = Tcp.connect(&address, PATIENCE).unwrap();
    (link, listener.accept().unwrap().0)
}

/// Sends a message over a real socket and answers what arrives, and the bytes on the way.
fn there(message: &Message) -> (Message, Vec<u8>) {
    let (mut sender, mut socket) = link_and_socket();
    let bytes = sender.send(message).unwrap();
    drop(sender);
    let mut sent = Vec::new();
    socket.read_to_end(&mut sent).unwrap();
    assert_eq!(sent.len(), bytes);
    (received(&sent).unwrap(), sent)
}

fn received(bytes: &[u8]) -> Result<Message, Error> {
    let (mut link, mut socket) = link_and_socket();
    let bytes = bytes.to_vec();
    let writer = std::thread::spawn(move || {
        // Who has seen enough of it hangs up.
        let _ = socket.write_all(&bytes);
    });
    let received = link.receive(1 << 20, PATIENCE).map(|(message, _)| message);
    drop(link);
    writer.join().unwrap();
    received
}

fn token() -> impl Strategy<Value = Token> {
    let logprob =
        prop_oneof![Just(None), any::<f32>().prop_map(Some), Just(Some(f32::NEG_INFINITY))];
    let top = proptest::collection::vec((any::<u32>(), -1e9_f32..0.0), 0..4);
    (any::<u32>(), logprob, top).prop_map(|(id, logprob, top)| Token {
        id,
        logprob,
        top,
        drafted: None,
    })
}

fn reason() -> impl Strategy<Value = Option<FinishReason>> {
    prop_oneof![
        Just(None),
        any::<u32>().prop_map(|id| Some(FinishReason::Stop(StopCause::Token(id)))),
        Just(Some(FinishReason::Stop(StopCause::Listener))),
        Just(Some(FinishReason::Length)),
        ".{0,20}".prop_map(|why| Some(FinishReason::Abort(why))),
    ]
}

fn returned() -> impl Strategy<Value = TokenRows> {
    let values = proptest::collection::vec(-9.0_f32..9.0, 0..12);
    (0_usize..9, values).prop_map(|(from, values)| {
        let routed_experts = HostRows { width: 2, values: vec![1, 7, 3, 0] };
        let hidden_states = HostRows { width: values.len(), values };
        TokenRows { from, hidden_states, routed_experts }
    })
}

fn prefilled() -> impl Strategy<Value = Prefilled> {
    let bytes = proptest::collection::vec(any::<u8>(), 0..40);
    let tokens = || proptest::collection::vec(token(), 0..4);
    let numbers = (0_usize..9, 0_usize..9);
    (tokens(), reason(), tokens(), returned(), numbers, proptest::option::of(bytes)).prop_map(
        |(tokens, ended, prompt, rows, (groups, cached_tokens), draft)| Prefilled {
            tokens,
            ended,
            prompt,
            rows,
            groups,
            cached_tokens,
            draft,
        },
    )
}

fn message() -> impl Strategy<Value = Message> {
    let bytes = || proptest::collection::vec(any::<u8>(), 0..60);
    let identity = || {
        proptest::collection::vec((".{0,8}", ".{0,8}"), 0..4).prop_map(|pairs| {
            pairs.iter().fold(Identity::default(), |all, (name, value)| all.with(name, value))
        })
    };
    let rows = (0_usize..4, 0_usize..4, 0_usize..40, 0_usize..99, bytes());
    prop_oneof![
        any::<[u8; 16]>().prop_map(|nonce| Message::Hello { nonce }),
        (any::<[u8; 16]>(), bytes()).prop_map(|(nonce, proof)| Message::Welcome { nonce, proof }),
        (bytes(), identity()).prop_map(|(proof, identity)| Message::Join { proof, identity }),
        identity().prop_map(|identity| Message::Ready { identity }),
        ".{0,30}".prop_map(Message::Refused),
        (any::<u64>(), 0_usize..99, any::<u64>(), 0_usize..9).prop_map(
            |(room, have, seed, candidates)| {
                Message::Claim { room, claim: Claim { have, seed, candidates } }
            }
        ),
        Just(Message::Wait),
        rows.prop_map(|(group, store, layer, row, bytes)| {
            let (layers, rows) = (layer..layer + 2, row..row + 3);
            Message::Rows(KvRows { group, store, layers, rows, bytes })
        }),
        returned().prop_map(Message::Returned),
        prefilled().prop_map(|prefilled| Message::Prefilled(Box::new(prefilled))),
        ".{0,30}".prop_map(Message::Failed),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_message_arrives_as_it_was_sent(message in message()) {
        // Values that are not numbers are not equal to themselves, but their bits are.
        prop_assert_eq!(format!("{:?}", there(&message).0), format!("{message:?}"));
    }

    #[test]
    fn a_changed_byte_never_goes_unnoticed(message in message(), at in any::<usize>(), bit in 0_u32..8) {
        let (_, mut sent) = there(&message);
        let at = at % sent.len();
        sent[at] ^= 1_u8 << bit;
        prop_assert!(received(&sent).is_err());
    }

    #[test]
    fn a_message_cut_short_is_refused(message in message(), at in any::<usize>()) {
        let (_, sent) = there(&message);
        prop_assert!(received(&sent[..at % sent.len()]).is_err());
    }

    #[test]
    fn garbage_is_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(received(&bytes).is_err());
    }
}

#[test]
fn a_length_alone_takes_no_memory_and_too_long_is_refused() {
    let (_, mut sent) = there(&Message::Wait);
    sent[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let error = received(&sent).unwrap_err().to_string();
    assert!(error.contains("a message is too long"), "{error}");
}

#[test]
fn a_silent_peer_is_given_up() {
    let (mut link, _socket) = link_and_socket();
    let error = link.receive(1 << 10, Duration::from_millis(30)).unwrap_err();
    assert!(matches!(error, Error::Silent { .. }), "{error}");
}

#[test]
fn a_peer_that_hung_up_is_noticed() {
    let (mut link, socket) = link_and_socket();
    assert!(!link.has_hung_up());
    drop(socket);
    let error = link.receive(1 << 10, PATIENCE).unwrap_err();
    assert!(matches!(error, Error::HungUp { .. }), "{error}");
    assert!(link.has_hung_up());
}
