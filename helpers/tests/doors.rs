//! Helpers that join over sockets, by the token of an invitation.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::transport::Group;
use kyklos::{Session, Tensor, in_process_group};
use kyklos_helpers::{Call, Door, HelperOptions, HelperState, Invitations, Knock, Owner, OwnerOptions, help};

#[expect(clippy::unwrap_used, reason = "tests")]
#[path = "../../tests/free_address.rs"]
mod free_address;

fn free_port() -> u16 {
    free_address::free_address().port()
}

/// Until the owner's only helper is in this state.
fn wait_for(owner: &mut Owner, state: HelperState) {
    let until = Instant::now() + Duration::from_secs(120);
    while owner.helpers().first().is_none_or(|helper| helper.state != state) {
        assert!(Instant::now() < until, "{:?}", owner.helpers());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Until the owner has closed the group before, its address has no place.
fn enter(knock: &mut Knock) -> Group {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        match knock.enter(Duration::from_secs(60), &[]) {
            Ok(group) => return group,
            Err(error) => assert!(Knock::may_try_again(&error) && Instant::now() < until, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_helper_joins_by_its_token_helps_goes_and_joins_again() {
    let folder = tempfile::tempdir().unwrap();
    let invitations = Invitations::in_folder(folder.path());
    let invitation = invitations.invite("kitchen", Some("127.0.0.1"), Some(free_port())).unwrap();
    assert!(invitations.invite("../kitchen", Some("127.0.0.1"), None).unwrap_err().is_request());
    let token = invitation.token().to_string();
    let mut options = OwnerOptions::default();
    options.always = true;
    let mut owner = Owner::new(options);
    let door = Door::open("kitchen", invitations.read("kitchen").unwrap(), owner.joining());
    let mut session = Session::new(in_process_group(1).remove(0), Device::cpu());
    let x = Tensor::new([1, 300, 4, 32], (0..300 * 4 * 32).map(|i| (i % 17) as f32 * 0.1).collect()).unwrap();
    let wanted = session.attend(&kyklos::Attention::new(), &x, &x, &x).unwrap().o.to_vec::<f32>().unwrap();
    let mut knock = Knock::new(&token).unwrap();
    for round in 0..2 {
        let group = enter(&mut knock);
        let leave = group.clone();
        let thread = std::thread::spawn(move || help(group, &Device::cpu(), &HelperOptions::default()));
        wait_for(&mut owner, HelperState::Ready);
        for _ in 0..3 {
            let o = owner.attend(&mut session, &Call::default(), &x, &x, &x).unwrap();
            assert!(o.to_vec::<f32>().unwrap() == wanted, "round {round}");
            owner.settle(Duration::from_secs(60));
        }
        assert!(owner.helpers()[0].calls > round, "{:?}", owner.helpers());
        leave.abort(kyklos::transport::Abort {
            culprit: kyklos::Rank(1),
            cause: kyklos::transport::AbortCause::Failed("the machine is needed".into()),
            progress: kyklos::transport::Progress::default(),
        });
        assert!(thread.join().unwrap().is_err());
        wait_for(&mut owner, HelperState::Lost);
    }
    assert_eq!(door.fault(), None);
}

#[test]
fn a_wrong_token_and_a_port_in_use_are_told() {
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let invitations = Invitations::in_folder(folder.path());
    let port = taken.local_addr().unwrap().port();
    let place = format!("127.0.0.1:{port}");
    invitations.invite("kitchen", Some("127.0.0.1"), Some(port)).unwrap();
    let owner = Owner::new(OwnerOptions::default());
    let door = Door::open("kitchen", invitations.read("kitchen").unwrap(), owner.joining());
    let until = Instant::now() + Duration::from_secs(60);
    while door.fault().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(door.fault().is_some_and(|fault| fault.contains(&place)), "{:?}", door.fault());
    assert!(Knock::new("kyklos1.nothing").is_err());
}

#[test]
fn an_invitation_keeps_its_secret_at_another_place() {
    let folder = tempfile::tempdir().unwrap();
    let invitations = Invitations::in_folder(folder.path());
    let token = |name, host, port| invitations.invite(name, host, port).unwrap().token().to_string();
    let refused = |name, host, port: Option<u16>| {
        let error = invitations.invite(name, host, port).unwrap_err();
        assert!(error.is_request(), "{error}");
    };
    let kitchen = token("kitchen", Some("10.0.0.1"), Some(29_801));
    let (secrets, _) = kitchen.split_once('@').unwrap();
    for (host, port, place) in [
        (None, None, "10.0.0.1:29801"),
        (Some("fd00::1"), None, "[fd00::1]:29801"),
        (None, Some(29_802), "[fd00::1]:29802"),
        (Some("[fd00::2]"), None, "[fd00::2]:29802"),
        (Some("studio.local"), Some(29_801), "studio.local:29801"),
    ] {
        assert_eq!(token("kitchen", host, port), format!("{secrets}@{place}"));
        assert_eq!(invitations.read("kitchen").unwrap().token().place(), place);
    }
    refused("other", Some("10.0.0.1"), Some(29_801));
    refused("other", Some("10.0.0.1"), Some(0));
    for host in ["", "10.0.0.1:29800", "[10.0.0.1]", "[studio", "a b", "http://studio"] {
        refused("kitchen", Some(host), None);
        refused("other", Some(host), Some(29_803));
    }
    let other = token("other", Some("10.0.0.1"), Some(29_803));
    assert!(!other.starts_with(secrets));
    refused("other", None, Some(29_801));
    assert_eq!(invitations.names().unwrap(), ["kitchen", "other"]);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
}
