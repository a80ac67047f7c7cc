//! Reports of a hostile member about ranks that it does not reach, while the group forms.

use std::time::Duration;

use kyklos_transport::Rank;
use kyklos_transport::quic::QuicConfig;
use kyklos_transport::wire::Frame;

use crate::common::member::Member;
use crate::common::*;
use crate::members::{HOSTILE, WORLD, framed};

#[test]
fn reports_of_unreached_ranks_are_bounded_and_name_no_rank_that_the_member_does_not_dial() {
    let _alone = alone();
    // Many of the longest ones, and then the member is ready: the group forms.
    let job = Job::new();
    let honest = [0, 1].map(|rank| connect(job.config(rank, WORLD)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut member = Member::come(&job, WORLD).await;
        let peers = (0..2048).map(|rank| Rank(rank * 7919)).collect();
        let report = Frame::Unreached { peers }.encode();
        for _ in 0..2000 {
            member.control.say(&report).await;
        }
        member.control.say(&Frame::Meshed.encode()).await;
        assert_eq!(member.control.hear(LONG).await, Some(Frame::Start));
    });
    let _groups = honest.map(|rank| rank.join().unwrap().unwrap());
    // Of what a report says, only lower ranks of the group are named.
    let job = Job::new();
    let connect_deadline = Duration::from_secs(20);
    let honest = [0, 1].map(|rank| connect(QuicConfig { connect_deadline, ..job.config(rank, WORLD) }));
    runtime.block_on(async {
        let member = Member::come(&job, WORLD).await;
        let peers = [vec![Rank(77), HOSTILE, Rank(u32::MAX)], vec![Rank(1); 100]].concat();
        member.control.say(&framed(&[Frame::Unreached { peers }])).await;
        // Until the time is up.
        member.control.connection.closed().await;
    });
    for error in honest.map(|rank| rank.join().unwrap().unwrap_err().to_string()) {
        assert!(error.contains("rank 2 did not reach rank 1 at 127.0.0.1:"), "{error}");
        assert!(!error.contains("rank 77") && !error.contains("more"), "{error}");
    }
}

#[test]
fn a_report_does_not_hide_an_error_that_has_another_cause() {
    let _alone = alone();
    let job = Job::new();
    let honest = [0, 1].map(|rank| connect(job.config(rank, WORLD)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let member = Member::come(&job, WORLD).await;
        // Long before the deadline: a report, and a frame that has no place here.
        let frames = [Frame::Unreached { peers: vec![Rank(1)] }, Frame::Start];
        member.control.say(&framed(&frames)).await;
        member.control.connection.closed().await;
    });
    for error in honest.map(|rank| rank.join().unwrap().unwrap_err().to_string()) {
        assert!(error.contains("rank 2 sent Start instead of Meshed"), "{error}");
        assert!(error.contains("rank 2 has had no answer from rank 1 at 127.0.0.1:"), "{error}");
        assert!(!error.contains("within") && !error.contains("let UDP through"), "{error}");
    }
}
