//! A token that gave a key which is revoked now: nobody gets in by it any more, whichever run of
//! rank 0 gave the key.

use std::path::PathBuf;

use super::register::{Asking, request};
use super::*;
use crate::quic::join::given_keys::{GivenKeys, MOST_KEYS};

/// Rank 0's folder.
struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    fn new(at: SocketAddr, size: u32) -> Self {
        let folder = Self { folder: tempfile::tempdir().unwrap() };
        invitation(at, size).write_file(&folder.path("invitation.pem")).unwrap();
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// As a new process reads it.
    fn invitation(&self) -> Arc<Invitation> {
        Arc::new(Invitation::read_file(&self.path("invitation.pem")).unwrap())
    }

    /// The list of the keys that the token has given.
    fn list(&self) -> PathBuf {
        let authority = self.invitation().token().authority.to_string();
        self.path(&format!("given-{}", &authority[..16]))
    }

    fn revoked(&self, keys: &[KeyHash]) -> Option<Revoked> {
        let lines: String = keys.iter().map(|key| format!("{key}  lost\n")).collect();
        std::fs::write(self.path("revoked"), lines).unwrap();
        Some(Revoked::read_file(&self.path("revoked")).unwrap())
    }
}

fn anywhere() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 1))
}

fn key_of(frame: &Frame) -> KeyHash {
    let Frame::Grant { certificate, .. } = frame else { panic!("{frame:?}") };
    KeyHash::of(&certificate.clone().into()).unwrap()
}

#[test]
fn a_token_lets_nobody_in_after_a_key_that_it_gave_in_any_run_was_revoked() {
    let folder = Folder::new(anywhere(), 4);
    let lost = request();
    let (_, first) = Asking::of(folder.invitation(), None).ask(None, &lost).unwrap();
    let (_, second) = Asking::of(folder.invitation(), None).ask(None, &request()).unwrap();
    let other = KeyHash([9; 32]);
    // Keys that came by other ways are no matter of this token, which is good for a later run.
    Asking::of(folder.invitation(), folder.revoked(&[other])).ask(None, &request()).unwrap();
    for key in [key_of(&first), key_of(&second)] {
        let mut asking = Asking::of(folder.invitation(), folder.revoked(&[other, key]));
        for (asked, request) in [(None, &lost), (None, &request()), (Some(3), &request())] {
            let (code, text) = asking.ask(asked, request).unwrap_err();
            assert!(code == RejectCode::Token && text.contains(&key.to_string()), "{text}");
            assert!(text.contains("make a new invitation"), "{text}");
        }
        // Without the token one learns nothing of that.
        let visit = asking.visit(2);
        let (_, text) = asking.register.answer(None, &request(), &[0; 32], &visit).unwrap_err();
        assert!(text.contains("another secret") && !text.contains("revoked"), "{text}");
    }
}

#[test]
fn a_new_invitation_at_the_same_path_lets_ranks_in() {
    let folder = Folder::new(anywhere(), 3);
    let (_, given) = Asking::of(folder.invitation(), None).ask(None, &request()).unwrap();
    let revoked = folder.revoked(&[key_of(&given)]);
    std::fs::remove_file(folder.path("invitation.pem")).unwrap();
    invitation(anywhere(), 3).write_file(&folder.path("invitation.pem")).unwrap();
    assert_eq!(Asking::of(folder.invitation(), revoked).ask(None, &request()).unwrap().0, Rank(1));
}

#[test]
fn an_invitation_in_memory_knows_the_keys_of_its_token_in_later_runs() {
    let (folder, invitation) = (Folder::new(anywhere(), 4), invitation(anywhere(), 3));
    let (_, given) = Asking::of(Arc::clone(&invitation), None).ask(None, &request()).unwrap();
    let revoked = folder.revoked(&[key_of(&given)]);
    let (code, _) = Asking::of(invitation, revoked).ask(None, &request()).unwrap_err();
    assert_eq!(code, RejectCode::Token);
}

#[test]
fn rank_0_gives_no_key_that_it_cannot_note() {
    let folder = Folder::new(anywhere(), 4);
    let (mut asking, list) = (Asking::of(folder.invitation(), None), folder.list());
    std::fs::create_dir(&list).unwrap();
    let (_, text) = asking.ask(None, &request()).unwrap_err();
    assert!(text.contains("cannot write") && text.contains("given-"), "{text}");
    // It does not start either.
    let error = Invitation::read_file(&folder.path("invitation.pem")).unwrap_err().to_string();
    assert!(error.contains("given-"), "{error}");
    std::fs::remove_dir(&list).unwrap();
    assert_eq!(asking.ask(None, &request()).unwrap().0, Rank(1));
    // A list that cannot be read as a whole may lack the key that was revoked.
    std::fs::write(&list, "rank 1\n").unwrap();
    let error = Invitation::read_file(&folder.path("invitation.pem")).unwrap_err().to_string();
    assert!(error.contains("given") && error.contains("line 1"), "{error}");
}

#[test]
fn the_list_of_given_keys_belongs_to_its_owner_and_has_an_end() {
    let folder = Folder::new(anywhere(), 2);
    let (path, authority) = (folder.path("invitation.pem"), folder.invitation().token().authority);
    let mut given = GivenKeys::beside(&path, &authority).unwrap();
    let key = |number: usize| {
        let mut bytes = [7; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        KeyHash(bytes)
    };
    for _ in 0..3 {
        given.note(Rank(1), key(0)).unwrap();
    }
    let list = folder.list();
    let text = std::fs::read_to_string(&list).unwrap();
    assert_eq!(text, format!("{}  rank 1, by token\n", key(0)));
    #[cfg(unix)]
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&list).unwrap()) & 0o777, 0o600);
    let mut in_memory = GivenKeys::default();
    for number in 0..MOST_KEYS {
        in_memory.note(Rank(2047), key(number)).unwrap();
    }
    let error = in_memory.note(Rank(1), key(MOST_KEYS)).unwrap_err();
    assert_eq!(error.bootstrap_kind(), BootstrapKind::Invitation);
    assert!(error.to_string().contains("10000 keys"), "{error}");
    in_memory.note(Rank(1), key(0)).unwrap();
    // As many lines can be read again.
    let lines: String =
        (0..MOST_KEYS).map(|number| format!("{}  rank 2047, by token\n", key(number))).collect();
    std::fs::write(&list, lines).unwrap();
    GivenKeys::beside(&path, &authority).unwrap();
}

#[test]
fn the_holder_of_a_revoked_key_does_not_come_back_by_its_token() {
    for carrier in [Carrier::Udp, Carrier::Tcp] {
        let at = free_address();
        let folder = Folder::new(at, 2);
        let first = Waiting::inviting(folder.invitation(), at, carrier, None);
        let over = |waiting: &Waiting| {
            let config = waiting.config(waiting.invitation.token());
            let link = LinkSettings { carrier, ..config.link };
            enrol(EnrolConfig { link, ..config })
        };
        let one = over(&first).unwrap();
        let key = one.identity.key_hash().unwrap();
        drop(first);
        // The next run of rank 0, at another port.
        let at = free_address();
        let next = Waiting::inviting(folder.invitation(), at, carrier, folder.revoked(&[key]));
        let error = over(&next).unwrap_err().to_string();
        assert!(error.contains(&format!("its token gave the key {key}, which has been revoked")), "{error}");
    }
}
