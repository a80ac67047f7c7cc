//! Helpers that join over sockets, by the token of an invitation.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use kyklos::backend::Device;
use kyklos::{Session, Tensor, in_process_group};
use kyklos_helpers::{Call, Door, HelperOptions, HelperState, Invitations, Knock, Owner, OwnerOptions, help};

fn free_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port").port()
}

/// Until the owner's only helper is in this state.
fn wait_for(owner: &mut Owner, state: HelperState) {
    let until = Instant::now() + Duration::from_secs(120);
    while owner.helpers().first().is_none_or(|helper| helper.state != state) {
        assert!(Instant::now() < until, "{:?}", owner.helpers());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_helper_joins_by_its_token_helps_goes_and_joins_again() {
    let folder = tempfile::tempdir().unwrap();
    let invitations = Invitations::in_folder(folder.path());
    let invitation = invitations.create("kitchen", &format!("127.0.0.1:{}", free_port())).unwrap();
    assert!(invitations.create("kitchen", "127.0.0.1:1").unwrap_err().is_request());
    assert!(invitations.create("../kitchen", "127.0.0.1:1").unwrap_err().is_request());
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
        let group = knock.enter(Duration::from_secs(60), &[]).unwrap();
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
    let place = format!("127.0.0.1:{}", taken.local_addr().unwrap().port());
    invitations.create("kitchen", &place).unwrap();
    let owner = Owner::new(OwnerOptions::default());
    let door = Door::open("kitchen", invitations.read("kitchen").unwrap(), owner.joining());
    let until = Instant::now() + Duration::from_secs(60);
    while door.fault().is_none() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(door.fault().is_some_and(|fault| fault.contains(&place)), "{:?}", door.fault());
    assert!(Knock::new("kyklos1.nothing").is_err());
}
