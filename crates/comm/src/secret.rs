//! Knowing the same secret without saying it: HMAC-SHA256 over both sides' nonces.

use sha2::{Digest, Sha256};

use crate::error::CommError;

/// A random number used once.
pub(crate) type Nonce = [u8; 32];
/// A message authentication code.
pub(crate) type Mac = [u8; 32];

/// A fresh nonce.
pub(crate) fn nonce() -> Result<Nonce, CommError> {
    random()
}

/// Random bytes from the operating system.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], CommError> {
    let mut bytes = [0u8; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                return Err(CommError::Io {
                    what: "the system gives no random numbers".into(),
                    source: e.into(),
                });
            }
        }
    }
    Ok(bytes)
}

/// Two hexadecimal digits a byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// HMAC-SHA256 (RFC 2104) of `parts`; each part goes in with its length, so that no two lists of parts are the same text.
pub(crate) fn mac(secret: &str, parts: &[&[u8]]) -> Mac {
    let mut text = Vec::new();
    for part in parts {
        text.extend_from_slice(&(part.len() as u64).to_le_bytes());
        text.extend_from_slice(part);
    }
    hmac(secret.as_bytes(), &text)
}

fn hmac(key: &[u8], text: &[u8]) -> Mac {
    let mut block = [0u8; 64];
    if key.len() > block.len() {
        block[..32].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let inner = Sha256::new().chain_update(block.map(|b| b ^ 0x36)).chain_update(text).finalize();
    Sha256::new().chain_update(block.map(|b| b ^ 0x5c)).chain_update(inner).finalize().into()
}

/// Whether two codes are equal, in a time that does not tell where they differ.
pub(crate) fn same(a: &Mac, b: &Mac) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0u8, |all, (x, y)| all | (x ^ y))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, cases 2 and 6.
    #[test]
    fn hmac_is_the_standards() {
        assert_eq!(
            hex(&hmac(b"Jefe", b"what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            hex(&hmac(&[0xaa; 131], b"Test Using Larger Than Block-Size Key - Hash Key First")),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    #[test]
    fn parts_do_not_run_together() {
        assert_ne!(mac("s", &[b"ab", b"c"]), mac("s", &[b"a", b"bc"]));
        assert!(same(&mac("s", &[b"ab"]), &mac("s", &[b"ab"])));
        assert!(!same(&mac("s", &[b"ab"]), &mac("t", &[b"ab"])));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
