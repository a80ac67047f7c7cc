//! All functions of the transport that read foreign bytes. Each takes any bytes. It must not panic,
//! and a decoded value must be the same after encoding and decoding. Where the layout is canonical,
//! the bytes must be the same too.

use std::cell::OnceCell;
use std::time::Duration;

use kyklos_transport::Rank;
pub(crate) use kyklos_transport::quic::decoders::{application, certificate, grant, names, revoked, routes};
use kyklos_transport::quic::{ClusterAuthority, Identity, Invitation, InvitationTerms, JobId, Token};
use kyklos_transport::wire::{Frame, FrameStream, HEADER_BYTES, MAX_FRAME_BYTES, MessageHeader, WireError};

/// Control frames: the bytes as they are, and as the body of a frame with the right length and
/// checksum.
pub(crate) fn frame(bytes: &[u8]) {
    canonical(bytes);
    canonical(&enveloped(bytes));
    // A mutated frame, with the checksum corrected.
    if let Some((covered, _)) = bytes.split_last_chunk::<4>() {
        let mut mended = covered.to_vec();
        mended.extend_from_slice(&crc32c::crc32c(covered).to_le_bytes());
        canonical(&mended);
    }
}

fn canonical(bytes: &[u8]) {
    if let Ok(Some((frame, taken))) = Frame::decode(bytes) {
        assert_eq!(frame.encode(), bytes[..taken], "{frame:?}");
        assert!(taken <= MAX_FRAME_BYTES, "a frame of {taken} bytes");
        // An incomplete frame never decodes.
        for end in [0, 3, 4, taken / 2, taken - 4, taken - 1] {
            assert_eq!(Frame::decode(&bytes[..end.min(taken - 1)]), Ok(None), "{end} bytes of {frame:?}");
        }
    }
}

/// A body with the right length before it and the right checksum after it.
pub(crate) fn enveloped(body: &[u8]) -> Vec<u8> {
    let mut framed = u32::try_from(body.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    framed.extend_from_slice(body);
    framed.extend_from_slice(&crc32c::crc32c(&framed).to_le_bytes());
    framed
}

/// A stream of frames. The first byte of the input is the size of the pieces in which the stream
/// arrives. Then each body follows its length in two bytes. The rest of the input goes into the
/// stream unchanged.
pub(crate) fn stream(bytes: &[u8]) {
    let Some((&piece_bytes, mut rest)) = bytes.split_first() else { return };
    let mut stream = Vec::new();
    while let Some((length, bodies)) = rest.split_first_chunk::<2>()
        && let Some((body, others)) = bodies.split_at_checked(usize::from(u16::from_le_bytes(*length)))
    {
        stream.extend_from_slice(&enveloped(body));
        rest = others;
    }
    stream.extend_from_slice(rest);
    let whole = said(&stream, stream.len());
    assert_eq!(said(&stream, usize::from(piece_bytes)), whole);
}

/// Reads a stream in pieces of this size. Returns its frames, encoded again; the error that ended
/// it; and whether it ended at the end of a frame.
fn said(stream: &[u8], piece_bytes: usize) -> (Vec<u8>, Option<WireError>, bool) {
    let (mut come, mut said) = (FrameStream::default(), Vec::new());
    for piece in stream.chunks(piece_bytes.max(1)) {
        come.put(piece);
        loop {
            match come.take() {
                Ok(Some(frame)) => said.extend_from_slice(&frame.encode()),
                Ok(None) => break,
                Err(error) => {
                    come.put(&Frame::Pong.encode());
                    assert_eq!(come.take(), Err(error.clone()), "something is read after an error");
                    return (said, Some(error), false);
                }
            }
        }
    }
    assert_eq!(said[..], stream[..said.len()]);
    (said, None, come.is_empty())
}

/// The header before a message, unchanged and with the right checksum.
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

/// A token as an operator pastes it.
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
            let of =
                |invitation: &Invitation| (invitation.token().clone(), invitation.size(), invitation.until());
            assert_eq!(of(&again), of(&invitation));
            std::fs::remove_file(&written).expect("the file");
        }
    });
}

/// An invitation for the first corpus. Its keys and its secret are new each time.
pub(crate) fn invitation() -> Invitation {
    let valid = Duration::from_secs(3600);
    let terms = InvitationTerms { place: "[fd00::1]:29600", size: 4, job: "fuzz", valid };
    Invitation::new(&terms).expect("an invitation")
}

/// An identity for the first corpus. Its keys are new each time.
pub(crate) fn seed() -> Identity {
    let authority = ClusterAuthority::new(JobId::from_name("fuzz")).expect("an authority");
    authority.issue(Rank(3)).expect("an identity")
}
