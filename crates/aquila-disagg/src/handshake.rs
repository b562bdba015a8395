//! How two workers get to know each other.
//!
//! The decode worker says a nonce, the prefill worker one of its own and its proof of the secret,
//! the decode worker its proof and what it is, the prefill worker what it is. So neither says what
//! it is before the other has proven that it knows the secret.

use std::time::Duration;

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::link::{Link, SMALL, refuse};
use crate::message::Message;
use crate::secret::{Role, Secret, nonce};

/// How long each message of it may take.
const PATIENCE: Duration = Duration::from_secs(5);

/// The decode worker's side.
pub(crate) fn join(link: &mut dyn Link, secret: &Secret, identity: &Identity) -> Result<()> {
    let ours = nonce().map_err(|e| Error::connection(link.peer(), e))?;
    link.send(&Message::Hello { nonce: ours })?;
    let (theirs, proof) = match link.receive(SMALL, PATIENCE)?.0 {
        Message::Welcome { nonce, proof } => (nonce, proof),
        Message::Refused(why) => return Err(Error::refused(link.peer(), why)),
        _ => return Err(Error::protocol(link.peer(), "a welcome was expected")),
    };
    if let Err(why) = secret.check(Role::Prefill, &ours, &theirs, &proof) {
        return refuse(link, why);
    }
    let proof = secret.prove(Role::Decode, &ours, &theirs);
    link.send(&Message::Join { proof, identity: identity.clone() })?;
    match link.receive(SMALL, PATIENCE)?.0 {
        Message::Ready { identity: other } => match identity.difference(&other) {
            Some(why) => refuse(link, why),
            None => Ok(()),
        },
        Message::Refused(why) => Err(Error::refused(link.peer(), why)),
        _ => Err(Error::protocol(link.peer(), "an answer to what this worker is was expected")),
    }
}

/// The prefill worker's side.
pub(crate) fn welcome(link: &mut dyn Link, secret: &Secret, identity: &Identity) -> Result<()> {
    let Message::Hello { nonce: theirs } = link.receive(SMALL, PATIENCE)?.0 else {
        return Err(Error::protocol(link.peer(), "a hello was expected"));
    };
    let ours = nonce().map_err(|e| Error::connection(link.peer(), e))?;
    let proof = secret.prove(Role::Prefill, &theirs, &ours);
    link.send(&Message::Welcome { nonce: ours, proof })?;
    let (proof, other) = match link.receive(SMALL, PATIENCE)?.0 {
        Message::Join { proof, identity } => (proof, identity),
        Message::Refused(why) => return Err(Error::refused(link.peer(), why)),
        _ => return Err(Error::protocol(link.peer(), "what the worker is was expected")),
    };
    if let Err(why) = secret.check(Role::Decode, &theirs, &ours, &proof) {
        return refuse(link, why);
    }
    if let Some(why) = other.difference(identity) {
        // "Here" is where it is read.
        return refuse(link, why);
    }
    link.send(&Message::Ready { identity: identity.clone() }).map(drop)
}
