//! Which collective a group gets for what it wants.

use std::time::Duration;

use kyklos::SessionOptions;
use kyklos::backend::Device;
use kyklos::local::on_threads;
use kyklos_cuda::{CollectiveChoice, CudaBackend, FormedCollective};
use kyklos_transport::in_process_group;
use pollster::block_on;

use crate::scenario::Scenario;

const OLD: &str = "version=21602";
const NO_NCCL: &str = "NCCL is not used: rank 0: NCCL cannot be used: its version is 2.16.2";
const NO_DEVICE: &str = "NCCL is not used: rank 1: its device is ";

pub(super) fn scenarios() -> Vec<Scenario> {
    use CollectiveChoice::{Auto, Host, Nccl};
    let (nccl, auto) = (Nccl { cluster: 0 }, Auto { cluster: 0 });
    // `cpu`: rank 1 is on cores. Then the beginning of the words, and whether messages go between
    // devices.
    let cases = [
        ("host", Host, "", false, "host memory", false),
        ("NCCL", nccl, "", false, "NCCL 2.21.5", true),
        ("NCCL", nccl, OLD, false, NO_NCCL, false),
        ("NCCL", nccl, "", true, NO_DEVICE, false),
        ("the best", auto, "", false, "NCCL 2.21.5", true),
        (
            "the best",
            auto,
            "",
            true,
            "NCCL 2.21.5 between ranks 0, 2; through host memory from and to rank 1",
            true,
        ),
        ("the best", auto, OLD, false, "copies from device to device between ranks 0, 1, 2", true),
        ("the best", auto, OLD, true, "copies from device to device between ranks 0, 2; all other", true),
    ];
    let one =
        |(wanted, wish, nccl, cpu, words, between): (&str, _, &'static str, bool, &'static str, bool)| {
            let of = if cpu { ", rank 1 on cores" } else { "" };
            let library = if nccl.is_empty() { "" } else { ", an old library" };
            let name = format!("a group that wants {wanted} agrees on its collective{of}{library}");
            let mut scenario = super::scenario(&name, 3, nccl, move || agrees(wish, cpu, words, between));
            scenario.says = &[];
            scenario
        };
    cases.into_iter().map(one).collect()
}

fn agrees(wish: CollectiveChoice, cpu: bool, words: &str, between: bool) {
    let deadline = Duration::from_secs(17);
    let told = on_threads(in_process_group(3), |transport| {
        let rank = transport.rank().0 as usize;
        let device = match rank {
            1 if cpu => Device::cpu(),
            _ => Device::from(CudaBackend::new(rank).unwrap()),
        };
        let options = SessionOptions { deadline, ..SessionOptions::default() };
        let formed = block_on(FormedCollective::form(wish, &transport, &device, &options)).unwrap();
        let text = formed.to_string();
        let FormedCollective { collective, way, between_devices, nccl, .. } = formed;
        assert_eq!((collective.deadline(), between_devices), (deadline, between), "{text}");
        // NCCL's observer is that of a rank that uses it.
        assert_eq!(nccl.is_some(), way.contains("NCCL") && !(cpu && rank == 1), "{text}");
        text
    });
    assert!(told.iter().all(|text| *text == told[0]), "{told:?}");
    let insists = matches!(wish, CollectiveChoice::Nccl { .. });
    let begins = if insists && !between { format!("host memory; {words}") } else { words.to_owned() };
    assert!(told[0].starts_with(&begins), "{told:?}");
    if begins.starts_with("copies") {
        assert!(told[0].contains("; NCCL is not used: "), "{told:?}");
    }
}
