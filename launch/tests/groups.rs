//! Groups that form by the options of this library. Every rank has its own thread.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../tests/free_address.rs"]
mod free_address;

use std::num::NonZeroU32;
use std::path::Path;
use std::thread;
use std::time::Duration;

use kyklos_launch::{Error, Options, RequestKind, SecretText};
use kyklos_transport::quic::{ClusterAuthority, Invitation, InvitationTerms, JobId};
use kyklos_transport::{Group, Rank, Tag};

use free_address::free_address;

const LIMIT: Duration = Duration::from_secs(20);

fn join_all(all: Vec<Options>) -> Vec<Group> {
    let joining: Vec<_> = all.into_iter().map(|options| thread::spawn(move || options.join())).collect();
    let mut groups: Vec<_> = joining.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    groups.sort_by_key(|group| group.transport.rank());
    groups
}

/// Every rank sends a message to the next one.
fn works(groups: &[Group]) {
    let size = groups.len() as u32;
    let tag = Tag { op: 0, message: 0 };
    for (rank, group) in (0..).zip(groups) {
        assert_eq!((group.transport.rank(), group.transport.size()), (Rank(rank), size));
        assert_eq!(group.members, (0..size).map(Rank).collect::<Vec<_>>());
    }
    let sends: Vec<_> = (0..size)
        .map(|rank| {
            let text = format!("from {rank}").into_bytes();
            let to = Rank((rank + 1) % size);
            groups[rank as usize].transport.post_send(to, tag, vec![text.into()], LIMIT)
        })
        .collect();
    for rank in 0..size {
        let from = (rank + size - 1) % size;
        let receive = groups[rank as usize].transport.post_recv(Rank(from), tag, &[6], LIMIT);
        assert_eq!(pollster::block_on(receive).unwrap(), [format!("from {from}")]);
    }
    for send in sends {
        pollster::block_on(send).unwrap();
    }
    let closes: Vec<_> = groups.iter().map(|group| group.transport.close(LIMIT)).collect();
    closes.into_iter().for_each(|close| pollster::block_on(close).unwrap());
}

fn identity_files(folder: &Path, size: u32) {
    let authority = ClusterAuthority::new(JobId::random().unwrap()).unwrap();
    for rank in 0..size {
        let identity = authority.issue(Rank(rank)).unwrap();
        identity.write_file(&folder.join(format!("rank-{rank}.pem"))).unwrap();
    }
}

#[test]
fn ranks_with_identity_files_form_a_group() {
    let folder = tempfile::tempdir().unwrap();
    identity_files(folder.path(), 3);
    let coordinator = free_address().to_string();
    let options = |rank| Options {
        rank: Some(rank),
        size: NonZeroU32::new(3),
        coordinator: Some(coordinator.clone()),
        identity: Some(folder.path().join("rank-{rank}.pem")),
        join_deadline: LIMIT,
        ..Options::default()
    };
    works(&join_all((0..3).map(options).collect()));
}

#[test]
fn a_cluster_file_gives_world_and_coordinator() {
    let folder = tempfile::tempdir().unwrap();
    identity_files(folder.path(), 2);
    let cluster = folder.path().join("cluster.toml");
    let ranks = "ranks = [{ host = 'localhost' }, { host = 'localhost' }]";
    std::fs::write(&cluster, format!("coordinator = '{}'\n{ranks}", free_address())).unwrap();
    let options = |rank| Options {
        rank: Some(rank),
        cluster_file: Some(cluster.clone()),
        identity: Some(folder.path().join("rank-{rank}.pem")),
        join_deadline: LIMIT,
        ..Options::default()
    };
    works(&join_all((0..2).map(options).collect()));
}

#[test]
fn ranks_with_a_token_get_their_ranks_from_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let coordinator = free_address().to_string();
    let terms =
        InvitationTerms { place: &coordinator, size: 3, job: "train", valid: Duration::from_secs(60) };
    let invitation = Invitation::new(&terms).unwrap();
    let path = folder.path().join("invitation.pem");
    invitation.write_file(&path).unwrap();
    let token = SecretText(invitation.token().to_string());
    assert!(!format!("{token:?}").contains(&token.0));
    let zero = Options { invitation: Some(path), join_deadline: LIMIT, ..Options::default() };
    let other = Options { token: Some(token), join_deadline: LIMIT, ..Options::default() };
    works(&join_all(vec![zero, other.clone(), other]));
}

#[test]
fn errors_name_options_by_their_fields_and_have_a_kind() {
    let refused = |options: Options| match options.join() {
        Err(Error::Request { text, kind }) => (text, kind),
        other => panic!("{other:?}"),
    };
    let (text, kind) = refused(Options { rank: Some(1), ..Options::default() });
    assert!(text.starts_with("option rank=1, and nothing says how many ranks there are: "), "{text}");
    assert_eq!(kind, RequestKind::Size);
    let token = Some(SecretText("secret".into()));
    let (text, kind) = refused(Options { token, rejoin: true, ..Options::default() });
    assert!(text.starts_with("option rejoin with option token: "), "{text}");
    assert_eq!(kind, RequestKind::Rejoin);
}

#[test]
fn a_device_of_the_cluster_file_is_the_callers_to_refuse() {
    let folder = tempfile::tempdir().unwrap();
    let cluster = folder.path().join("cluster.toml");
    std::fs::write(&cluster, "ranks = [{ host = 'a' }, { host = 'b', device = 'abacus' }]").unwrap();
    let options = Options {
        rank: Some(0),
        cluster_file: Some(cluster),
        check_device: |device| Err(format!("no {device} here")),
        ..Options::default()
    };
    let error = options.join().unwrap_err();
    assert!(matches!(&error, Error::Device { rank: 1, .. }), "{error:?}");
    assert!(error.is_request() && error.to_string().ends_with("rank 1: no abacus here"), "{error}");
}
