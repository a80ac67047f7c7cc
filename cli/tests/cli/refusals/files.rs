//! Refusals of input and output files. A file is checked by its header before anything is allocated
//! for its tensors.

use super::of_program;
use crate::support::transcript_holds;

#[test]
fn files() {
    transcript_holds("files", &of_program(COMMANDS));
}

const COMMANDS: &[&str] = &[
    "attend --input DIR/none",
    "attend --input DIR",
    "attend --input DIR/short",
    "attend --input DIR/huge-header",
    "attend --input DIR/cut-header",
    "attend --input DIR/cut-data",
    "attend --input DIR/trailing",
    "attend --input DIR/no-v",
    "attend --input DIR/three-extents",
    "attend --input DIR/integers",
    "attend --input DIR/two-dtypes",
    "attend --input DIR/k-unlike-v",
    "attend --input DIR/q-unlike-k",
    "attend --input DIR/good --dtype f16",
    "attend --input DIR/sinks-shape",
    "attend --input DIR/sinks-nan",
    "attend --input DIR/mask-and-bias",
    "attend --input DIR/bias-dtype",
    "attend --input DIR/mask-shape",
    "attend --input DIR/bias-shape",
    "attend --input DIR/mask-batch",
    "ATTEND --output /",
    "ATTEND --output /dev/null",
    "ATTEND --device cpu --output DIR/none/out",
    "ATTEND --device cpu --output DIR/good/out",
    "ATTEND --device cpu --trace DIR/none/trace.json",
    "ATTEND --device cpu --trace DIR/good/trace.json",
    "ATTEND --device cpu --trace DIR/folder",
    "plan --shape 1,64,8,2,64 --explain --probe --save DIR/none/cluster.toml",
    "plan --shape 1,64,8,2,64 --report DIR/none/page.html",
    "attend --input DIR/good --output DIR/good",
    "ATTEND --report page-{rank}.html",
    "ATTEND --record DIR/good/records",
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 ATTEND --metrics 127.0.0.1:65535",
    "ATTEND --metrics 0.0.0.0:9000",
    "ATTEND --watch localhost:80",
    "ATTEND --watch 127.0.0.1:9400 --metrics 127.0.0.1:9400",
    "doctor DIR/folder",
];
