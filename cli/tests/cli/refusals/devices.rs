//! Refusals of devices and kernels, and of the benches that compare them.

use super::of_program;
use crate::support::transcript_holds;

#[test]
fn devices() {
    transcript_holds("devices", &of_program(COMMANDS));
}

const COMMANDS: &[&str] = &[
    "LD_LIBRARY_PATH=DIR/no-driver ATTEND --device cuda",
    "VK_DRIVER_FILES=DIR/none VK_ICD_FILENAMES=DIR/none ATTEND --device wgpu",
    "ATTEND --device cuda:x",
    "ATTEND --device cuda:",
    "tune --device cuda",
    "ATTEND --device tpu",
    "ATTEND --device wgpu:x",
    "ATTEND --device cpu,cpu",
    "ATTEND --tab-page http://localhost:8000/tab.html",
    "ATTEND --device tab --tab-address 0.0.0.0",
    "ATTEND --device tab --tab-page tab.html",
    "ATTEND --ranks 2 --collective nccl --device cuda,cpu",
    "ATTEND --nccl-cluster 1",
    "bench --device tab",
    "bench --device cpu --kernel fast",
    "bench --device cpu --shape 1,16,2,2,8 --queries 17",
    "bench --device cpu --verify",
    "bench --device cpu,cpu --kernel auto,portable --against other=true",
    "tune --device cpu",
    "tune --kernel portable-2x4",
    "KYKLOS_TUNE=off tune",
    "KYKLOS_TUNE=no devices",
    "KYKLOS_CUDA_GRAPHS=no devices",
    "KYKLOS_CUDA_WGMMA=no devices",
    "KYKLOS_CUDA_IMAGE= devices",
    "bench strategies --output DIR/new --shape 1,64,8,2,64",
    "bench strategies --output DIR/new --ranks 300",
    "bench strategies --output DIR/new --ranks 2 --rank 0",
    "bench strategies --output DIR/new --rejoin",
    "bench strategies --output DIR/cells --device cpu",
    "bench strategies --output DIR/no-cells --device cpu",
    "launch -n 2 -- bench strategies --output DIR/new --ranks 2",
    "bench plans --ranks 4 --strategy relay",
    "bench plans --ranks 1024 --tokens 4294967295",
    "launch -n 2 -- bench strategies --output DIR/new --transport in-process",
];
