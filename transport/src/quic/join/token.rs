//! The token: one line of text with which a rank can enrol.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::hmac;
use aws_lc_rs::rand;
use data_encoding::HEXLOWER;

use super::binding::BINDING_BYTES;
use crate::error::{BootstrapKind, TransportError};
use crate::quic::trust::key_hash::KeyHash;

/// `kyklos1.HASH.SECRET@HOST:PORT`: the hash of the authority's key, the secret, and where rank 0
/// is.
///
/// `Display` prints all of it, the secret too; `Debug` does not. With it any process can become a
/// rank until it expires.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    pub(super) authority: KeyHash,
    pub(super) secret: Secret,
    place: String,
}

impl Token {
    /// A new one, with a secret of the system's randomness.
    pub(super) fn new(authority: KeyHash, place: &str) -> Result<Self, TransportError> {
        Self { authority, secret: Secret::random()?, place: String::new() }.at(place)
    }

    /// The same token for another address of rank 0.
    pub(super) fn at(self, place: &str) -> Result<Self, TransportError> {
        if !is_place(place) {
            return Err(TransportError::bootstrap(format!(
                "{place:?} is no address of rank 0: write host:port, such as node1:29600 or [fd00::1]:29600"
            )));
        }
        Ok(Self { place: place.to_owned(), ..self })
    }

    /// Where rank 0 is, as it was written: `node1:29600`.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// The first 16 hexadecimal digits of the hash of the authority's key, by which the holder of
    /// a token recognises an announcement of its rank 0. No secret, and no proof of anything.
    pub fn owner(&self) -> String {
        HEXLOWER.encode(&self.authority.0[..OWNER_BYTES])
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}.", self.authority)?;
        write!(f, "{}@{}", HEXLOWER.encode(&self.secret.0), self.place)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({PREFIX}{}.…@{})", self.authority, self.place)
    }
}

impl FromStr for Token {
    type Err = TransportError;

    /// # Errors
    ///
    /// [`TransportError::Bootstrap`], which does not repeat the text: a typing mistake leaves most
    /// of a secret as it is.
    fn from_str(text: &str) -> Result<Self, TransportError> {
        let wrong = |what: &str| {
            BootstrapKind::Token.error(format!("this is not a whole token, {what}: copy the whole token"))
        };
        let rest = text.strip_prefix(PREFIX).ok_or_else(|| wrong("it does not begin with kyklos1."))?;
        let (secrets, place) = rest.split_once('@').ok_or_else(|| wrong("it has no @ before an address"))?;
        let (authority, secret) =
            secrets.split_once('.').ok_or_else(|| wrong("it has no two numbers before the @"))?;
        let authority = from_hex(authority).map(KeyHash);
        let authority = authority.ok_or_else(|| wrong("its first number has not 64 hexadecimal digits"))?;
        let secret = from_hex(secret).map(Secret);
        let secret = secret.ok_or_else(|| wrong("its second number has not 32 hexadecimal digits"))?;
        if !is_place(place) {
            return Err(wrong("it does not end with host:port"));
        }
        Ok(Self { authority, secret, place: place.to_owned() })
    }
}

/// The secret in a token.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Secret([u8; SECRET_BYTES]);

impl Secret {
    fn random() -> Result<Self, TransportError> {
        let mut bytes = [0; SECRET_BYTES];
        rand::fill(&mut bytes).map_err(|_| TransportError::bootstrap("no randomness for a secret"))?;
        Ok(Self(bytes))
    }

    /// Proves knowledge of the secret to the other end of the connection with this `binding`.
    pub(super) fn prove(&self, binding: &[u8; BINDING_BYTES]) -> [u8; PROOF_BYTES] {
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(hmac::sign(&self.key(), binding).as_ref());
        proof
    }

    /// Takes the same time whatever is wrong.
    pub(super) fn is_proven(&self, binding: &[u8; BINDING_BYTES], proof: &[u8; PROOF_BYTES]) -> bool {
        hmac::verify(&self.key(), binding, proof).is_ok()
    }

    fn key(&self) -> hmac::Key {
        hmac::Key::new(hmac::HMAC_SHA256, &self.0)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Exactly `N` bytes, in small letters.
fn from_hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    HEXLOWER.decode(text.as_bytes()).ok()?.try_into().ok()
}

/// Whether it looks like `host:port`; whether there is such a host, the resolver knows.
fn is_place(place: &str) -> bool {
    let fine = |c: char| c.is_ascii_alphanumeric() || ".-_:%[]".contains(c);
    place.len() <= LONGEST_PLACE
        && place.chars().all(fine)
        && place.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|number| number != 0)
        })
}

/// The number is the version.
const PREFIX: &str = "kyklos1.";

/// 128 bits: as hard to guess as the session keys of TLS are.
const SECRET_BYTES: usize = 16;

/// Bytes of an HMAC-SHA256.
const PROOF_BYTES: usize = 32;

/// Enough that no two authorities are taken for each other by chance.
const OWNER_BYTES: usize = 8;

/// A host's name has at most 253 characters.
const LONGEST_PLACE: usize = 262;

#[cfg(test)]
mod tests {
    use super::*;

    fn token(place: &str) -> Result<Token, TransportError> {
        Token::new(KeyHash([7; 32]), place)
    }

    #[test]
    fn a_token_is_one_line_that_is_read_back() {
        for place in ["node1:29600", "10.0.0.1:1", "[fd00::1]:29600", "a.b-c_d:65535"] {
            let token = token(place).unwrap();
            let text = token.to_string();
            assert_eq!(text.parse::<Token>().unwrap(), token);
            assert_eq!((token.place(), text.len()), (place, 106 + place.len()));
            assert_eq!(token.owner(), text[8..24]);
        }
        assert_ne!(token("a:1").unwrap().secret, token("a:1").unwrap().secret);
    }

    #[test]
    fn what_is_no_token_is_refused_without_its_secret() {
        let whole = token("node1:29600").unwrap().to_string();
        let secret = &whole[73..105];
        for wrong in [
            "",
            "kyklos2.x",
            &whole[..whole.len() - 12],
            &whole[1..],
            &whole.replace("kyklos1.", "kyklos1.0"),
            &whole.replace('@', "0@"),
            &whole.replace(':', ""),
            &whole.replace("29600", "0"),
            &whole.replace("node1", "no de"),
            &whole.replace("node1", &"a".repeat(300)),
            &whole.to_uppercase(),
        ] {
            let error = wrong.parse::<Token>().unwrap_err().to_string();
            assert!(error.contains("not a whole token") && !error.contains(secret), "{wrong}: {error}");
        }
        assert!(!format!("{:?}", whole.parse::<Token>().unwrap()).contains(secret));
        for wrong in ["", "node1", ":1", "node1:0", "node1:x", "a b:1"] {
            assert!(token(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_proof_is_of_one_secret_and_one_connection() {
        let (one, other) = (Secret([1; 16]), Secret([2; 16]));
        let proof = one.prove(&[3; 32]);
        assert!(one.is_proven(&[3; 32], &proof));
        assert!(!one.is_proven(&[4; 32], &proof));
        assert!(!other.is_proven(&[3; 32], &proof));
        for byte in 0..proof.len() {
            let mut changed = proof;
            changed[byte] ^= 1;
            assert!(!one.is_proven(&[3; 32], &changed));
        }
    }
}
