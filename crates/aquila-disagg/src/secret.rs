//! The secret that workers share: each proves to the other that it knows it, without saying it.

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use crate::message::Nonce;

/// Who proves.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Role {
    Prefill,
    Decode,
}

/// The secret, or none.
#[derive(Clone, Default)]
pub struct Secret(Option<hmac::Key>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_some() { "Secret(…)" } else { "Secret(none)" })
    }
}

impl Secret {
    /// A secret of these bytes.
    pub fn new(secret: &[u8]) -> Self {
        Self(Some(hmac::Key::new(hmac::HMAC_SHA256, secret)))
    }

    /// Whether there is one.
    pub fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// That this worker knows the secret, for one connection; empty where there is none.
    pub(crate) fn prove(&self, role: Role, decode: &Nonce, prefill: &Nonce) -> Vec<u8> {
        let prove = |key| hmac::sign(key, &signed(role, decode, prefill)).as_ref().to_vec();
        self.0.as_ref().map(prove).unwrap_or_default()
    }

    /// Checks the other worker's proof.
    ///
    /// # Errors
    /// Why it is none.
    pub(crate) fn check(
        &self,
        role: Role,
        decode: &Nonce,
        prefill: &Nonce,
        proof: &[u8],
    ) -> Result<(), &'static str> {
        match &self.0 {
            None if proof.is_empty() => Ok(()),
            None => Err("the other worker has a shared secret and this one has none"),
            Some(_) if proof.is_empty() => {
                Err("this worker has a shared secret and the other one has none")
            }
            Some(key) => hmac::verify(key, &signed(role, decode, prefill), proof)
                .map_err(|_| "the shared secrets differ"),
        }
    }
}

fn signed(role: Role, decode: &Nonce, prefill: &Nonce) -> Vec<u8> {
    let role: &[u8] = match role {
        Role::Prefill => b"prefill",
        Role::Decode => b"decode",
    };
    [role, decode, prefill].concat()
}

/// A nonce of this machine's random numbers.
pub(crate) fn nonce() -> std::io::Result<Nonce> {
    let mut nonce = Nonce::default();
    SystemRandom::new()
        .fill(&mut nonce)
        .map_err(|_| std::io::Error::other("the system has no random numbers"))?;
    Ok(nonce)
}
