//! Groups whose identities do not match, or match by host instead of by rank; and the errors of
//! both sides.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use super::free_address::free_address;
use crate::error::{Abort, BootstrapKind, TransportError};
use crate::quic::forming::first_group::first_group;
use crate::quic::transport::bind;
use crate::quic::*;
use crate::rank::{Progress, Rank, Tag};
use crate::transport::Group;
use crate::transport::Regroup;

const JOB: JobId = JobId([5; 16]);

type Formed = Result<Group, TransportError>;

fn authority() -> ClusterAuthority {
    ClusterAuthority::new(JOB).unwrap()
}

fn config(rank: u32, coordinator: SocketAddr, identity: Identity) -> QuicConfig {
    let connect_deadline = Duration::from_secs(6);
    QuicConfig { connect_deadline, ..QuicConfig::new(Rank(rank), 2, JOB, coordinator, identity) }
}

fn connect(config: QuicConfig) -> JoinHandle<Formed> {
    std::thread::spawn(move || QuicTransport::connect(config))
}

/// Forms a group of two and ends it. Returns the errors of both ranks if the group does not form.
fn meet(zero: Identity, one: Identity, places: &[&str]) -> Result<(), (String, String)> {
    meet_with(zero, one, places, [None, None])
}

/// The same with lists of revoked keys.
fn meet_with(
    zero: Identity,
    one: Identity,
    places: &[&str],
    revoked: [Option<&Revoked>; 2],
) -> Result<(), (String, String)> {
    let coordinator = free_address();
    let places: Vec<Option<String>> = places.iter().map(|place| Some((*place).to_owned())).collect();
    let [zero, one] = [(0, zero), (1, one)].map(|(rank, identity)| {
        let revoked = revoked[rank as usize].cloned();
        connect(QuicConfig { places: places.clone(), revoked, ..config(rank, coordinator, identity) })
    });
    match (zero.join().unwrap(), one.join().unwrap()) {
        (Ok(zero), Ok(one)) => {
            let closing = [&zero, &one].map(|rank| rank.close(Duration::from_secs(10)));
            closing.into_iter().for_each(|closed| pollster::block_on(closed).unwrap());
            Ok(())
        }
        (Err(zero), Err(one)) => Err((zero.to_string(), one.to_string())),
        (zero, one) => panic!("only one rank joined: {:?} {:?}", zero.err(), one.err()),
    }
}

fn host(authority: &ClusterAuthority, names: &[&str]) -> Identity {
    let names = HostNames::new(names.iter().copied()).unwrap();
    authority.issue_to(&Subject::Host(names), Validity::days(1)).unwrap()
}

#[track_caller]
fn both_say((zero, one): (String, String), words: &[&str]) {
    for word in words {
        assert!(zero.contains(word) && one.contains(word), "`{word}` is not in both: {zero} | {one}");
    }
}

/// Rank 1 has refused the certificate of rank 0. Rank 0 does not repeat what a side says that has
/// not shown its identity.
#[track_caller]
fn one_says((zero, one): (String, String), words: &[&str]) {
    assert!(zero.contains("it refuses the certificate of this rank; its own error says why"), "{zero}");
    for word in words {
        assert!(one.contains(word), "no `{word}` in {one}");
    }
}

#[test]
fn an_identity_of_another_authority_is_refused_with_the_reason() {
    let (ours, theirs) = (authority(), authority());
    let errors = meet(ours.issue(Rank(0)).unwrap(), theirs.issue(Rank(1)).unwrap(), &[]).unwrap_err();
    // The dialling rank verifies first. So rank 1 reports that rank 0's certificate is from another
    // authority.
    one_says(errors, &["rank 0", "another authority", "issue certificates that trust both"]);
}

#[test]
fn a_certificate_that_has_expired_or_is_not_valid_yet_is_refused_by_name_and_date_on_both_sides() {
    let authority = authority();
    let hour = Duration::from_secs(3600);
    let now = SystemTime::now();
    let expired = Validity { from: now - 3 * hour, until: now - hour };
    let early = Validity { from: now + hour, until: now + 3 * hour };
    for (validity, word, at, remedy) in [
        (expired, "expired on", now - hour, "issue a new certificate"),
        (early, "is not valid before", now + hour, "set the clock"),
    ] {
        let rank = |rank| authority.issue_at(&Subject::Rank(Rank(rank)), JOB, validity).unwrap();
        let date = Date(at).to_string();
        let errors = meet(authority.issue(Rank(0)).unwrap(), rank(1), &[]).unwrap_err();
        both_say(errors, &["rank 1", word, &date, remedy]);
        // Only rank 0 knows of its own certificate. It does not listen, so the other ranks get no answer.
        let (zero, one) = meet(rank(0), authority.issue(Rank(1)).unwrap(), &[]).unwrap_err();
        assert!(zero.contains(word) && zero.contains(&date) && zero.contains(remedy), "{zero}");
        assert!(one.contains("rank 0 did not answer"), "{one}");
    }
}

/// A rank 0 whose clock is slow takes its own expired certificate for valid; one whose clock is
/// fast one that is not valid yet. Both sides know by the alert which it is.
#[test]
fn a_rank_0_out_of_date_that_listens_all_the_same_is_refused_by_name_date_and_kind() {
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let expired = Validity { from: now - 3 * hour, until: now - hour };
    let early = Validity { from: now + hour, until: now + 3 * hour };
    for (validity, words, kind) in [
        (expired, ["expired on", "issue a new certificate"], BootstrapKind::Certificate),
        (early, ["is not valid before", "set the clock"], BootstrapKind::Clock),
    ] {
        let authority = authority();
        let wrong = authority.issue_at(&Subject::Rank(Rank(0)), JOB, validity).unwrap();
        let coordinator = free_address();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let zero = config(0, coordinator, wrong);
        let connect_deadline = Duration::from_secs(60);
        let one =
            QuicConfig { connect_deadline, ..config(1, coordinator, authority.issue(Rank(1)).unwrap()) };
        let (one, error) = runtime.block_on(async {
            let source = bind(&zero).unwrap();
            let one = connect(one);
            let endpoint = QuicTransport::open_endpoint_unchecked(zero, source, None).unwrap();
            (one, first_group(&endpoint, None).await.unwrap_err())
        });
        let one = one.join().unwrap().err().unwrap();
        assert_eq!((error.bootstrap_kind(), one.bootstrap_kind()), (kind, kind), "{error}; {one}");
        let at = Date(if kind == BootstrapKind::Clock { validity.from } else { validity.until });
        let begins = "the certificate of rank 0 of job";
        one_says((error.to_string(), one.to_string()), &[begins, words[0], &at.to_string(), words[1]]);
        // The words of the TLS library are not shown.
        assert!(!one.to_string().contains("Other"), "{one}");
    }
}

#[test]
fn a_rank_with_the_identity_of_another_rank_is_named_on_both_sides() {
    let authority = authority();
    let identity = |rank| authority.issue(Rank(rank)).unwrap();
    both_say(meet(identity(0), identity(2), &[]).unwrap_err(), &["rank 1 has the certificate of rank 2"]);
}

#[test]
fn a_rank_of_another_job_of_the_same_authority_is_named_on_both_sides() {
    let authority = authority();
    let other = authority.issue_at(&Subject::Rank(Rank(1)), JobId([6; 16]), Validity::days(1)).unwrap();
    let errors = meet(authority.issue(Rank(0)).unwrap(), other, &[]).unwrap_err();
    both_say(errors, &[&JOB.to_string(), &JobId([6; 16]).to_string()]);
}

#[test]
fn a_host_serves_the_ranks_that_have_their_place_on_it() {
    let authority = authority();
    let (a, b) = (host(&authority, &["node-a"]), host(&authority, &["node-b", "192.0.2.7"]));
    meet(a.clone(), b.clone(), &["node-a", "node-b"]).unwrap();
    meet(a.clone(), b.clone(), &["node-a", "192.0.2.7"]).unwrap();
    meet(a.clone(), a.clone(), &["node-a", "node-a"]).unwrap();
    meet(a.clone(), authority.issue(Rank(1)).unwrap(), &["node-a", "anywhere"]).unwrap();
    let errors = meet(a.clone(), b.clone(), &["node-a", "node-c"]).unwrap_err();
    both_say(errors, &["rank 1 has its place on host node-c, but has the certificate of host node-b"]);
    // Without a list of hosts, the address at which other ranks see a rank must be the address of its
    // host.
    let here = host(&authority, &["node-a", "127.0.0.1"]);
    meet(here.clone(), here.clone(), &[]).unwrap();
    let errors = meet(here, b, &[]).unwrap_err();
    both_say(errors, &["rank 1 is at 127.0.0.1, but has the certificate of host node-b"]);
}

#[test]
fn a_rank_is_where_it_was_told_to_be() {
    let authority = authority();
    let (coordinator, port) = (free_address(), free_address().port());
    let zero = connect(config(0, coordinator, authority.issue(Rank(0)).unwrap()));
    let one = connect(QuicConfig { port, ..config(1, coordinator, authority.issue(Rank(1)).unwrap()) });
    let group = [zero, one].map(|rank| rank.join().unwrap().unwrap());
    assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_err(), "nobody uses port {port}");
    let closing = group.each_ref().map(|rank| rank.close(Duration::from_secs(10)));
    closing.into_iter().for_each(|closed| pollster::block_on(closed).unwrap());
}

#[test]
fn rank_0_on_a_host_that_is_not_its_place_is_refused_by_who_dials_it() {
    let authority = authority();
    let coordinator = free_address();
    let zero = QuicConfig {
        places: vec![Some("node-b".into())],
        ..config(0, coordinator, host(&authority, &["node-b"]))
    };
    let one = QuicConfig {
        places: vec![Some("node-a".into())],
        ..config(1, coordinator, authority.issue(Rank(1)).unwrap())
    };
    let zero = connect(zero);
    let error = connect(one).join().unwrap().err().unwrap().to_string();
    assert!(error.contains("rank 0 has its place on host node-a") && error.contains("node-b"), "{error}");
    assert!(zero.join().unwrap().is_err());
}

#[test]
fn a_cluster_changes_its_authority_while_old_and_new_identities_meet() {
    let root = tempfile::tempdir().unwrap();
    let folder = |name: &str| root.path().join(name);
    for name in ["old", "new"] {
        ClusterAuthority::create(&folder(name), 10).unwrap();
    }
    let issue = |name: &str, also: Option<&Path>, rank| {
        let mut authority = ClusterAuthority::read(&folder(name), "train").unwrap();
        if let Some(also) = also {
            authority.also_trust(also).unwrap();
        }
        authority.issue_at(&Subject::Rank(Rank(rank)), JOB, Validity::days(1)).unwrap()
    };
    let (old, new) = (folder("old/authority.pem"), folder("new/authority.pem"));
    // The states of a host during the change, in order. Hosts in neighbouring states must form a group.
    let states: [&dyn Fn(u32) -> Identity; 4] = [
        &|rank| issue("old", None, rank),
        &|rank| issue("old", Some(&new), rank),
        &|rank| issue("new", Some(&old), rank),
        &|rank| issue("new", None, rank),
    ];
    for (index, state) in states.iter().enumerate() {
        meet(state(0), state(1), &[]).unwrap();
        if let Some(next) = states.get(index + 1) {
            meet(state(0), next(1), &[]).unwrap();
            meet(next(0), state(1), &[]).unwrap();
        }
    }
    // Hosts in states that are not neighbours do not form a group.
    one_says(meet(states[0](0), states[3](1), &[]).unwrap_err(), &["another authority"]);
    assert!(meet(states[0](0), states[2](1), &[]).is_err());
}

/// A list of keys in its own file.
fn list(path: &Path, identities: &[&Identity]) -> Revoked {
    let lines = identities.iter().map(|identity| format!("{}  lost\n", identity.key_hash().unwrap()));
    std::fs::write(path, lines.collect::<String>()).unwrap();
    Revoked::read_file(path).unwrap()
}

#[test]
fn a_revoked_identity_is_refused_by_whoever_has_the_list() {
    let (authority, folder) = (authority(), tempfile::tempdir().unwrap());
    let [zero, one, again] = [0, 1, 1].map(|rank| authority.issue(Rank(rank)).unwrap());
    let path = folder.path().join("revoked");
    let meet = |zero: &Identity, one: &Identity, lists| meet_with(zero.clone(), one.clone(), &[], lists);
    // Rank 0 is dialled, and rank 1 dials.
    let lost = list(&path, &[&one]);
    let errors = meet(&zero, &one, [Some(&lost), None]).unwrap_err();
    both_say(errors, &["the certificate of rank 1 of job", "has been revoked, by the list of rank 0"]);
    // Another identity of the same rank is accepted.
    meet(&zero, &again, [Some(&lost), Some(&lost)]).unwrap();
    // A rank with a revoked identity finds it in its own list, without a connection.
    let (_, own) = meet(&zero, &one, [Some(&lost), Some(&lost)]).unwrap_err();
    assert!(own.contains("rank 1") && own.contains("revoked, by its own list"), "{own}");
    let lost = list(&path, &[&zero]);
    let errors = meet(&zero, &one, [None, Some(&lost)]).unwrap_err();
    one_says(errors, &["the certificate of rank 0 of job", "has been revoked, by the list of rank 1"]);
    // The identity of a host counts as one identity for all ranks of that host.
    let (node, other) = (host(&authority, &["127.0.0.1"]), host(&authority, &["127.0.0.1"]));
    let lost = list(&path, &[&node]);
    both_say(meet(&zero, &node, [Some(&lost), None]).unwrap_err(), &["host 127.0.0.1", "revoked"]);
    meet(&zero, &other, [Some(&lost), Some(&lost)]).unwrap();
}

#[test]
fn a_list_that_names_more_when_a_group_forms_again_keeps_them_out() {
    let (authority, folder) = (authority(), tempfile::tempdir().unwrap());
    let identities: Vec<_> = (0..4).map(|rank| authority.issue(Rank(rank)).unwrap()).collect();
    let path = folder.path().join("revoked");
    let revoked = list(&path, &[]);
    let coordinator = free_address();
    let ranks: Vec<_> = (0..4)
        .map(|rank| {
            // Rank 2 does not have the list.
            let revoked = (rank != 2).then(|| revoked.clone());
            let config = config(rank, coordinator, identities[rank as usize].clone());
            connect(QuicConfig { size: 4, connect_deadline: Duration::from_secs(10), revoked, ..config })
        })
        .collect();
    let mut group: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
    // Rank 3 dies, and the identity of rank 2 is revoked.
    list(&path, &[&identities[2]]);
    drop(group.pop());
    let next: Vec<_> = group
        .iter()
        .map(|rank| {
            let posted = rank.post_recv(
                Rank((rank.rank().0 + 1) % 3),
                Tag { op: 0, message: 0 },
                &[1],
                Duration::from_secs(20),
            );
            let _ = pollster::block_on(posted);
            rank.reform(Regroup::Survivors, Duration::from_secs(12))
        })
        .collect();
    let mut next: Vec<_> = next.into_iter().map(pollster::block_on).collect();
    let two = next.pop().unwrap().unwrap_err().to_string();
    assert!(two.contains("rank 2 could not form a group again") && two.contains("has been revoked"), "{two}");
    for reformed in &next {
        assert_eq!(reformed.as_ref().unwrap().members, [Rank(0), Rank(1)], "{two}");
    }
    // A list that has become unreadable ends the next attempt.
    let pair: Vec<_> = next.into_iter().map(|reformed| reformed.unwrap().transport).collect();
    std::fs::write(&path, "rank 2").unwrap();
    pair[0].abort(Abort {
        culprit: Rank(0),
        cause: crate::error::AbortCause::Failed("a test".into()),
        progress: Progress::default(),
    });
    std::thread::sleep(Duration::from_millis(500));
    let error = pollster::block_on(pair[0].reform(Regroup::Survivors, Duration::from_secs(5)))
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 1, begins with \"rank\""), "{error}");
}
