//! Memory that two ranks share, and how they get it: what a peer may hand over, and who may come.

use std::future::Future;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use bytes::Bytes;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::timeout;

use super::meeting::{Meeting, MeetingPlace, accept, connect, receive_file, send_file};
use super::notices::{NOTICE_BYTES, Notice};
use super::segment::{SLOTS, Segment, SegmentSize};
use super::sender::SharedSender;
use crate::rank::{Rank, Tag};
use crate::wire::{MemoryOffer, MessageHeader};

const SMALL: SegmentSize = SegmentSize { chunk_bytes: 4096 };

/// More bytes than a file may have: the kernel refuses at once, and reserves nothing.
const NOT_POSSIBLE: SegmentSize = SegmentSize { chunk_bytes: 1 << 60 };

fn run<T>(test: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(Duration::from_secs(30), test).await.expect("it ends") })
}

#[test]
fn the_memory_of_a_rank_is_bounded_whatever_the_number_of_ranks() {
    let chunk = |size| SegmentSize::of_group(size).map(|size| size.chunk_bytes);
    assert_eq!([1, 2, 17].map(chunk), [Some(512 << 10); 3]);
    assert_eq!([33, 129].map(chunk), [Some(256 << 10), Some(64 << 10)]);
    assert_eq!([130, 2048, u32::MAX].map(chunk), [None; 3]);
    for ranks in 2..=129 {
        let size = SegmentSize::of_group(ranks).unwrap();
        assert!(size.bytes() * (ranks as usize - 1) <= 64 << 20, "{ranks}: {size:?}");
    }
}

#[test]
fn bytes_stay_within_their_slot() {
    let segment = Segment::new(SMALL).unwrap();
    for slot in 0..SLOTS {
        segment.write(slot, 0, &[slot as u8 + 1; 4096]).unwrap();
    }
    let mut read = [0; 4096];
    for slot in 0..SLOTS {
        segment.read(slot, 0, &mut read).unwrap();
        assert_eq!(read, [slot as u8 + 1; 4096]);
    }
    for (slot, at, length) in [(SLOTS, 0, 1), (0, 4096, 1), (0, 1, 4096), (7, usize::MAX, 2)] {
        let mut into = vec![0; length];
        assert!(segment.read(slot, at, &mut into).is_err(), "{slot} {at} {length}");
        assert!(segment.write(slot, at, &into).is_err(), "{slot} {at} {length}");
    }
}

#[test]
fn nobody_changes_the_size_of_a_segment() {
    let segment = Segment::new(SMALL).unwrap();
    let file = segment.file().unwrap();
    for bytes in [0, 4096, 1 << 20] {
        assert_eq!(ftruncate(file, bytes), Err(rustix::io::Errno::PERM), "{bytes}");
    }
    assert_eq!(fcntl_add_seals(file, SealFlags::WRITE), Err(rustix::io::Errno::PERM));
}

#[test]
fn memory_that_there_is_not_is_an_error() {
    let error = Segment::new(NOT_POSSIBLE).unwrap_err();
    assert!(error.contains("bytes of shared memory"), "{error}");
}

fn memory(bytes: usize, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, bytes as u64).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Files that a hostile peer may hand over, with a word of the refusal.
fn hostile_files() -> Vec<(OwnedFd, &'static str)> {
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let mut disk = tempfile::tempfile_in(std::env::current_dir().unwrap()).unwrap();
    disk.write_all(&vec![0; SMALL.bytes()]).unwrap();
    let (pipe, _) = std::io::pipe().unwrap();
    vec![
        (memory(SMALL.bytes(), SealFlags::empty()), "can change its size"),
        (memory(SMALL.bytes(), SealFlags::SHRINK), "can change its size"),
        (memory(SMALL.bytes(), SealFlags::GROW), "can change its size"),
        (memory(SMALL.bytes() - 4096, both), "bytes, not"),
        (memory(SMALL.bytes() + 1, both), "bytes, not"),
        (memory(0, both), "bytes, not"),
        (disk.into(), "its memory file"),
        (pipe.into(), "not memory"),
        (std::fs::File::open("/dev/zero").unwrap().into(), "its memory file"),
        (std::net::UdpSocket::bind("127.0.0.1:0").unwrap().into(), "not memory"),
    ]
}

#[test]
fn files_whose_pages_could_go_away_are_refused() {
    for (number, (file, word)) in hostile_files().into_iter().enumerate() {
        let error = Segment::of_peer(file, SMALL).unwrap_err();
        assert!(error.contains(word), "file {number}: {error}");
    }
    let segment = Segment::new(SMALL).unwrap();
    let file = segment.file().unwrap().try_clone_to_owned().unwrap();
    Segment::of_peer(file, SMALL).unwrap().read(0, 0, &mut [1; 10]).unwrap();
}

async fn met(place: MeetingPlace, offer: MemoryOffer) -> [Meeting; 2] {
    let (host, guest) = tokio::join!(place.meet(SMALL), accept(offer, SMALL));
    [host.unwrap(), guest.unwrap()]
}

#[test]
fn two_that_meet_have_each_others_memory() {
    run(async {
        let (place, offer) = MeetingPlace::open().unwrap();
        let [host, guest] = met(place, offer).await;
        for (from, to, byte) in [(&host, &guest, 7), (&guest, &host, 9)] {
            from.outgoing.write(3, 100, &[byte; 50]).unwrap();
            let mut read = [0; 50];
            to.incoming.read(3, 100, &mut read).unwrap();
            assert_eq!(read, [byte; 50]);
        }
    });
}

#[test]
fn others_who_come_are_sent_away_and_disturb_nobody() {
    run(async {
        let (place, offer) = MeetingPlace::open().unwrap();
        let stranger = async {
            for shown in [&[0; 32][..], &offer.secret_of_host, &[1; 5]] {
                let mut socket = connect(offer.socket).unwrap();
                socket.write_all(shown).await.unwrap();
                socket.shutdown().await.unwrap();
                // It is given nothing.
                assert_eq!(socket.read(&mut [0; 1]).await.unwrap(), 0);
            }
            accept(offer, SMALL).await
        };
        let (host, guest) = tokio::join!(place.meet(SMALL), stranger);
        host.unwrap();
        guest.unwrap();
    });
}

#[test]
fn a_socket_that_is_not_reached_is_another_host() {
    run(async {
        let (place, offer) = MeetingPlace::open().unwrap();
        drop(place);
        let error = accept(offer, SMALL).await.unwrap_err();
        assert!(error.contains("is not reached"), "{error}");
    });
}

/// The error of a guest at whose meeting `host` answers.
async fn guest_of<F: Future<Output = ()>>(host: impl FnOnce(UnixStream, MemoryOffer) -> F) -> String {
    let (place, offer) = MeetingPlace::open().unwrap();
    let host = async { host(place.guest().await.unwrap(), offer).await };
    let (guest, ()) = tokio::join!(accept(offer, SMALL), host);
    guest.unwrap_err()
}

#[test]
fn a_guest_takes_memory_only_from_the_rank_that_made_the_offer() {
    run(async {
        let error = guest_of(async |socket, _| {
            let segment = Segment::new(SMALL).unwrap();
            send_file(&socket, &[0; 32], segment.file().unwrap()).await.unwrap();
        });
        assert!(error.await.contains("another process answers"));
        let nothing = guest_of(async |mut socket, offer| {
            socket.write_all(&offer.secret_of_host).await.unwrap();
        });
        assert!(nothing.await.contains("ended the meeting"));
        assert!(guest_of(async |_, _| ()).await.contains("ended the meeting"));
        for (file, word) in hostile_files() {
            let error = guest_of(async |socket, offer| {
                send_file(&socket, &offer.secret_of_host, file.as_fd()).await.unwrap();
                // The guest leaves, and hands over nothing.
                assert!(receive_file(&socket, &mut [0; 1]).await.is_err());
            });
            let error = error.await;
            assert!(error.contains(word), "{error}");
        }
    });
}

#[test]
fn a_host_takes_only_memory_whose_size_is_sealed() {
    run(async {
        for (file, word) in hostile_files() {
            let (place, offer) = MeetingPlace::open().unwrap();
            let guest = async {
                let mut socket = connect(offer.socket).unwrap();
                socket.write_all(&offer.secret_of_guest).await.unwrap();
                receive_file(&socket, &mut [0; 32]).await.unwrap();
                send_file(&socket, &[1], file.as_fd()).await.unwrap();
                // The host never says that it is ready.
                assert_eq!(socket.read(&mut [0; 1]).await.unwrap_or(0), 0);
            };
            let (host, ()) = tokio::join!(place.meet(SMALL), guest);
            let error = host.unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    });
}

#[test]
fn a_rank_without_memory_ends_the_meeting_for_both() {
    run(async {
        let (place, offer) = MeetingPlace::open().unwrap();
        let (host, guest) = tokio::join!(place.meet(NOT_POSSIBLE), accept(offer, SMALL));
        assert!(host.unwrap_err().contains("bytes of shared memory"));
        assert!(guest.unwrap_err().contains("ended the meeting"));
        let (place, offer) = MeetingPlace::open().unwrap();
        let guest = async {
            let mut socket = connect(offer.socket).unwrap();
            socket.write_all(&offer.secret_of_guest).await.unwrap();
            receive_file(&socket, &mut [0; 32]).await.unwrap();
        };
        let (host, ()) = tokio::join!(place.meet(SMALL), guest);
        assert!(host.unwrap_err().contains("ended the meeting"));
    });
}

fn header() -> MessageHeader {
    MessageHeader {
        job_low: 0,
        epoch: 0,
        from: Rank(0),
        to: Rank(1),
        tag: Tag { op: 0, message: 0 },
        part_count: 1,
        part_digest: 0,
        total_bytes: 4096,
        chunk: 0,
    }
}

#[test]
fn a_sender_waits_until_a_slot_is_free_and_believes_no_other_number() {
    run(async {
        let sender = SharedSender::new(Segment::new(SMALL).unwrap());
        let chunk = || std::iter::once(Bytes::from(vec![1; 4096]));
        assert!(sender.freed(1).is_err());
        for _ in 0..SLOTS {
            sender.send(&header(), chunk()).await.unwrap();
        }
        let wait = Duration::from_millis(20);
        assert!(timeout(wait, sender.send(&header(), chunk())).await.is_err());
        assert!(sender.freed(SLOTS as u32 + 1).is_err() && sender.freed(u32::MAX).is_err());
        sender.freed(1).unwrap();
        timeout(wait, sender.send(&header(), chunk())).await.unwrap().unwrap();
        assert!(timeout(wait, sender.send(&header(), chunk())).await.is_err());
        assert_eq!(sender.moved_bytes().0, (SLOTS as u64 + 1) * 4096);
        sender.freed(SLOTS as u32).unwrap();
        // A chunk that does not fit is a mistake of this rank.
        let long = std::iter::once(Bytes::from(vec![1; 4097]));
        assert!(sender.send(&header(), long).await.is_err());
    });
}

#[test]
fn notices_come_back_the_same_and_other_bytes_are_refused() {
    for notice in [Notice::Free(7), Notice::Chunk { header: header().encode(), checksum: u64::MAX - 1 }] {
        assert_eq!(Notice::decode(&notice.encode()), Ok(notice));
    }
    for kind in (0..=u8::MAX).filter(|kind| ![1, 2].contains(kind)) {
        let mut bytes = [0; NOTICE_BYTES];
        bytes[0] = kind;
        assert!(Notice::decode(&bytes).is_err(), "{kind}");
    }
    let mut padded = Notice::Free(1).encode();
    padded[NOTICE_BYTES - 1] = 1;
    assert!(Notice::decode(&padded).is_err());
}
