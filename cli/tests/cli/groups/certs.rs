//! `kyklos certs`.

use std::path::Path;

use crate::support::*;

fn certs(folder: &Path, arguments: &[&str]) -> std::process::Output {
    let mut command = command(&[&["certs"][..], arguments].concat());
    command.current_dir(folder).output().unwrap()
}

#[test]
fn an_authority_is_made_once_and_its_key_is_its_owners() {
    let folder = tempfile::tempdir().unwrap();
    let made = certs(folder.path(), &["init", "--days", "100"]);
    succeeds(&made);
    assert!(stdout(&made).contains("authority/authority.pem") && stdout(&made).contains("99 days"));
    let again = certs(folder.path(), &["init"]);
    assert_eq!(again.status.code(), Some(2));
    assert!(stderr(&again).contains("never overwritten"), "{}", stderr(&again));
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |name: &str| folder.path().join(name).metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode("authority"), mode("authority/authority.key")), (0o700, 0o600));
    }
}

#[test]
fn identities_are_issued_shown_and_never_overwritten() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &str| certs(folder.path(), &arguments.split_whitespace().collect::<Vec<_>>());
    let missing = run("issue -n 1");
    assert!(stderr(&missing).contains("kyklos certs init"), "{}", stderr(&missing));
    succeeds(&run("init"));
    succeeds(&run("issue --ranks 0-1,7 --job train --output ids"));
    succeeds(&run("issue --host node1,10.0.0.1 --host fd00::1 --output ids"));
    for name in ["rank-0.pem", "rank-1.pem", "rank-7.pem", "host-node1.pem", "host-fd00--1.pem"] {
        assert!(folder.path().join("ids").join(name).exists(), "{name}");
    }
    let shown = run("show ids/rank-7.pem ids/host-node1.pem authority/authority.pem");
    succeeds(&shown);
    for word in
        ["rank 7 of job train", "host node1,10.0.0.1 of job cluster", "29 days", "3649 days", "trusts", "UTC"]
    {
        assert!(stdout(&shown).contains(word), "`{word}` is not in: {}", stdout(&shown));
    }
    // The authority lists the issued identities. An operator can copy these lines into a list of
    // revoked identities.
    let issued = std::fs::read_to_string(folder.path().join("authority/issued")).unwrap();
    let line = issued.lines().find(|line| line.contains("rank 7 of job train")).unwrap();
    let (key, _) = line.split_once("  ").unwrap();
    assert_eq!((issued.lines().count(), key.len()), (5, 64), "{issued}");
    assert!(stdout(&shown).contains(&format!("key {key}")), "{}", stdout(&shown));
    let soon = run("show ids/rank-7.pem --warn-days 40");
    assert_eq!(soon.status.code(), Some(1));
    assert!(stderr(&soon).contains("ids/rank-7.pem expires on"), "{}", stderr(&soon));
    // One of the files already exists, so the command writes no file.
    refused(&run("issue --ranks 7-8 --output ids"), &["ids/rank-7.pem exists", "--output"]);
    assert!(!folder.path().join("ids/rank-8.pem").exists());
    refused(&run("issue --host a,b --host a,c"), &["written twice"]);
    for wrong in [
        "issue",
        "issue --job x",
        "issue --ranks 3-1",
        "issue -n 0",
        "issue -n 2 --ranks 0-1",
        "issue --host a/b",
        "show",
    ] {
        assert_eq!(run(wrong).status.code(), Some(2), "{wrong}");
    }
    let long = run("issue -n 1 --days 3650 --output late");
    assert!(long.status.success() || stderr(&long).contains("the authority ends on"), "{}", stderr(&long));
    assert_eq!(run("show authority/authority.key").status.code(), Some(2));
}
