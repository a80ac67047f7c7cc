//! Everything of the transport that reads bytes it did not write. Each takes any bytes: it must not panic, what it
//! decodes must come back the same, and where the layout is canonical so must the bytes.

use std::cell::OnceCell;

use std::time::Duration;

use kyklos_transport::quic::{Identity, Invitation, InvitationTerms, Token};
use kyklos_transport::wire::{Frame, HEADER_BYTES, MessageHeader};

/// Control frames: the bytes as they are, and as the body of a frame whose length and checksum fit.
pub(crate) fn frame(bytes: &[u8]) {
    canonical(bytes);
    let mut framed = u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    framed.extend_from_slice(bytes);
    framed.extend_from_slice(&crc32c::crc32c(&framed).to_le_bytes());
    canonical(&framed);
    // A frame that has been changed, with the checksum of what it is now.
    if let Some((covered, _)) = bytes.split_last_chunk::<4>() {
        let mut mended = covered.to_vec();
        mended.extend_from_slice(&crc32c::crc32c(covered).to_le_bytes());
        canonical(&mended);
    }
}

fn canonical(bytes: &[u8]) {
    if let Ok(Some((frame, taken))) = Frame::decode(bytes) {
        assert_eq!(frame.encode(), bytes[..taken], "{frame:?}");
    }
}

/// The header before a message, as it is and with a checksum that fits.
pub(crate) fn header(bytes: &[u8]) {
    let same = |bytes: &[u8]| {
        if let Ok(header) = MessageHeader::decode(bytes) {
            assert_eq!(header.encode()[..], *bytes, "{header:?}");
        }
    };
    same(bytes);
    if let Some(covered) = bytes.get(..HEADER_BYTES - 4) {
        let mut mended = covered.to_vec();
        mended.extend_from_slice(&crc32c::crc32c(covered).to_le_bytes());
        same(&mended);
    }
}

/// The file of an identity, with the names in its certificate.
pub(crate) fn identity(bytes: &[u8]) {
    thread_local!(static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| tempfile::tempdir().expect("a folder"));
        let [read, written] = ["read.pem", "written.pem"].map(|name| folder.path().join(name));
        if !read.exists() {
            // Made by the transport, so that only its owner can read it.
            seed().write_file(&read).expect("a file");
        }
        std::fs::write(&read, bytes).expect("the file");
        if let Ok(identity) = Identity::read_file(&read) {
            identity.write_file(&written).expect("a file");
            let again = Identity::read_file(&written).expect("what was written");
            let of = |identity: &Identity| (identity.claims().ok(), identity.authorities());
            assert_eq!(of(&again), of(&identity));
            std::fs::remove_file(&written).expect("the file");
        }
    });
}

/// A token, as an operator pastes it.
pub(crate) fn token(bytes: &[u8]) {
    if let Ok(token) = String::from_utf8_lossy(bytes).parse::<Token>() {
        assert_eq!(token.to_string().as_bytes(), bytes);
    }
}

/// The file of an invitation.
pub(crate) fn invitation_file(bytes: &[u8]) {
    thread_local!(static FOLDER: OnceCell<tempfile::TempDir> = const { OnceCell::new() });
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| tempfile::tempdir().expect("a folder"));
        let [read, written] = ["read.pem", "written.pem"].map(|name| folder.path().join(name));
        if !read.exists() {
            // Made by the transport, so that only its owner can read it.
            invitation().write_file(&read).expect("a file");
        }
        std::fs::write(&read, bytes).expect("the file");
        if let Ok(invitation) = Invitation::read_file(&read) {
            invitation.write_file(&written).expect("a file");
            let again = Invitation::read_file(&written).expect("what was written");
            let of = |invitation: &Invitation| {
                (invitation.token().clone(), invitation.world(), invitation.until())
            };
            assert_eq!(of(&again), of(&invitation));
            std::fs::remove_file(&written).expect("the file");
        }
    });
}

/// An invitation to begin with; its keys and its secret are new each time.
pub(crate) fn invitation() -> Invitation {
    let valid = Duration::from_secs(3600);
    let terms = InvitationTerms { place: "[fd00::1]:29600", world: 4, job: "fuzz", valid };
    Invitation::new(&terms).expect("an invitation")
}

/// An identity to begin with; its keys are new each time.
pub(crate) fn seed() -> Identity {
    use kyklos_transport::Rank;
    use kyklos_transport::quic::{ClusterAuthority, JobId};
    let authority = ClusterAuthority::new(JobId::from_name("fuzz")).expect("an authority");
    authority.issue(Rank(3)).expect("an identity")
}
