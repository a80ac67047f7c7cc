//! Identities that are renewed while their ranks run: they count from the next group on.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use pollster::block_on;

use super::free_address::free_address;
use crate::error::{Abort, AbortCause, TransportError};
use crate::quic::*;
use crate::rank::{Progress, Rank, Vote};
use crate::transport::{Group, Regroup};

const JOB: JobId = JobId([6; 16]);
const LONG: Duration = Duration::from_secs(15);

/// An identity that ends soon.
fn short(authority: &ClusterAuthority, rank: u32) -> Identity {
    let now = SystemTime::now();
    let validity =
        Validity { from: now - Duration::from_secs(3600), until: now + Duration::from_secs(SHORT) };
    authority.issue_at(&Subject::Rank(Rank(rank)), JOB, validity).unwrap()
}

/// Puts an identity into a file, in place of another one.
fn put(identity: &Identity, path: &Path) {
    let new = path.with_extension("new");
    identity.write_file(&new).unwrap();
    std::fs::rename(&new, path).unwrap();
}

static WARNINGS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Whether a warning has all of the words.
fn warned(words: &[&str]) -> bool {
    WARNINGS.lock().unwrap().iter().any(|text| words.iter().all(|word| text.contains(word)))
}

/// Forms a group of two whose identities are in `files`.
fn form(files: [&Path; 2], carrier: Carrier) -> Vec<Group> {
    let coordinator = free_address();
    let ranks: Vec<_> = (0..)
        .zip(files)
        .map(|(rank, file)| {
            let identity = Identity::read_file(file).unwrap();
            let mut config = QuicConfig::new(Rank(rank), 2, JOB, coordinator, identity);
            config.identity_file = Some(file.to_owned());
            config.link.carrier = carrier;
            config.warn = |text, _| WARNINGS.lock().unwrap().push(text.to_owned());
            std::thread::spawn(move || QuicTransport::connect(config))
        })
        .collect();
    ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect()
}

/// Ends the group, and forms the next one.
fn again(group: &[Group]) -> Vec<Result<Group, TransportError>> {
    let cause = AbortCause::Failed("a test".into());
    group[0].abort(Abort { culprit: Rank(0), cause, progress: Progress::default() });
    for rank in group {
        let vote = Vote::Ready { plan_hash: [0; 32], note: bytes::Bytes::new() };
        block_on(rank.agree(vote, LONG)).unwrap_err();
    }
    let posted: Vec<_> = group.iter().map(|rank| rank.reform(Regroup::Survivors, LONG)).collect();
    posted.into_iter().map(block_on).collect()
}

fn close(group: Vec<Result<Group, TransportError>>) {
    let group: Vec<_> = group.into_iter().map(|rank| rank.unwrap()).collect();
    let closing: Vec<_> = group.iter().map(|rank| rank.close(LONG)).collect();
    closing.into_iter().for_each(|closed| block_on(closed).unwrap());
}

/// Identities end so many seconds after they were made: more than a busy machine needs to form a
/// group.
const SHORT: u64 = 15;

/// Waits until they have ended. Validity is in whole seconds.
fn wait_for_the_end(since: Instant) {
    std::thread::sleep((since + Duration::from_secs(SHORT + 2)).saturating_duration_since(Instant::now()));
}

#[test]
fn a_renewed_identity_counts_when_the_group_forms_again() {
    let renewed = [Carrier::Udp, Carrier::Tcp].map(|carrier| {
        std::thread::spawn(move || {
            let (authority, folder) = (ClusterAuthority::new(JOB).unwrap(), tempfile::tempdir().unwrap());
            let [zero, one] = ["zero", "one"].map(|name| folder.path().join(name));
            let since = Instant::now();
            put(&short(&authority, 0), &zero);
            put(&short(&authority, 1), &one);
            let group = form([&zero, &one], carrier);
            put(&authority.issue(Rank(0)).unwrap(), &zero);
            put(&authority.issue(Rank(1)).unwrap(), &one);
            wait_for_the_end(since);
            close(again(&group));
        })
    });
    renewed.into_iter().for_each(|renewed| renewed.join().unwrap());
}

#[test]
fn an_identity_that_was_not_renewed_is_refused_by_name_after_its_end() {
    let (authority, folder) = (ClusterAuthority::new(JOB).unwrap(), tempfile::tempdir().unwrap());
    let [zero, one] = ["zero", "one"].map(|name| folder.path().join(name));
    put(&authority.issue(Rank(0)).unwrap(), &zero);
    let since = Instant::now();
    put(&short(&authority, 1), &one);
    let group = form([&zero, &one], Carrier::Udp);
    wait_for_the_end(since);
    let one = again(&group).pop().unwrap().unwrap_err().to_string();
    assert!(one.contains("rank 1") && one.contains("expired on"), "{one}");
}

#[test]
fn a_file_with_something_else_changes_nothing() {
    let (authority, folder) = (ClusterAuthority::new(JOB).unwrap(), tempfile::tempdir().unwrap());
    let [zero, one] = ["zero", "one"].map(|name| folder.path().join(name));
    put(&authority.issue(Rank(0)).unwrap(), &zero);
    put(&authority.issue(Rank(1)).unwrap(), &one);
    let group = form([&zero, &one], Carrier::Udp);
    // The identity of another rank, and one of another authority.
    put(&authority.issue(Rank(1)).unwrap(), &zero);
    put(&ClusterAuthority::new(JOB).unwrap().issue(Rank(1)).unwrap(), &one);
    let group: Vec<_> = again(&group).into_iter().map(|rank| rank.unwrap()).collect();
    let keeps = "keeps the identity that it has";
    assert!(warned(&["rank 0", keeps, "has the certificate of rank 1"]), "{WARNINGS:?}");
    assert!(warned(&["rank 1", keeps, "is of an authority that this rank does not trust"]), "{WARNINGS:?}");
    // No file, and no identity.
    std::fs::remove_file(&zero).unwrap();
    std::fs::remove_file(&one).unwrap();
    std::fs::write(&one, "key").unwrap();
    close(again(&group));
    assert!(warned(&["rank 0", keeps, "cannot read the identity"]), "{WARNINGS:?}");
}

#[test]
fn an_authority_that_this_rank_did_not_trust_at_its_start_is_not_taken_for_granted_later() {
    let folder = tempfile::tempdir().unwrap();
    let [old, new] = [0; 2].map(|_| ClusterAuthority::new(JOB).unwrap());
    let [zero, one] = ["zero", "one"].map(|name| folder.path().join(name));
    let issue = |authority: &ClusterAuthority, other: &ClusterAuthority| {
        for (rank, file) in (0..).zip([&zero, &one]) {
            let mut identity = authority.issue(Rank(rank)).unwrap();
            identity.authorities.push(other.issue(Rank(rank)).unwrap().authorities.remove(0));
            put(&identity, file);
        }
    };
    put(&old.issue(Rank(0)).unwrap(), &zero);
    put(&old.issue(Rank(1)).unwrap(), &one);
    let group = form([&zero, &one], Carrier::Udp);
    // The steps by which an authority is changed: trust both, then use the new one.
    issue(&old, &new);
    let group: Vec<_> = again(&group).into_iter().map(|rank| rank.unwrap()).collect();
    issue(&new, &old);
    close(again(&group));
    assert!(warned(&["is of an authority that this rank does not trust since its start"]), "{WARNINGS:?}");
}
