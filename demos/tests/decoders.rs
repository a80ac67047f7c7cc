//! Whatever bytes are in a file, a variable or an argument, the program's decoders neither panic nor hold more memory
//! than the bytes can account for. The targets are those of `fuzz/`.

#[path = "../../fuzz/bounded.rs"]
mod bounded;

use bounded::{Limit, corpus, run};
use kyklos_cli::decoders::ALL;

/// What each target begins with: as the program writes it, or as its documents show it.
fn made(target: &str) -> Vec<(String, Vec<u8>)> {
    let texts: &[(&str, &str)] = match target {
        "record" => &[("ring", include_str!("decoders/record.jsonl"))],
        "tuning" => &[("one", include_str!("decoders/tuning.json"))],
        "cluster_file" => &[
            (
                "three",
                "job = \"train\"\ncoordinator = \"a:1234\"\n[[ranks]]\nhost = \"a\"\n[[ranks]]\nhost = \"fd00::1\"\ndevice = \"wgpu:1\"\n",
            ),
            ("list", "ranks = [{ host = \"a\" }, { host = \"b\", device = \"cpu\" }]\n"),
        ],
        "nodelist" => &[("hosts", "node[01-03,7]-x[1-2],other"), ("tasks", "2(x3),1")],
        "arguments" => &[
            (
                "attend",
                "attend\n--shape\n1,512,8,2,64\n--mask\ncausal+window:16,-1+documents:0,128,512\n--mesh\n2x2\n--split\nwork:1,2,3,4\n--replicated\n0..16",
            ),
            (
                "slices",
                "plan\n--shape\n1,64,2,2,8\n--mask\nslices:0..32x0..64/causal,32..64x0..16/both\n--tokens\n32,32\n--wire\nint8",
            ),
            ("devices", "bench\n--device\nwgpu:1,cpu\n--shape\n1,64,2,2,8\n--against\na=b\n--dtype\nbf16"),
            ("ranks", "certs\nissue\n--ranks\n0-3,9\n--job\ntrain\n--host\na,10.0.0.1"),
            ("group", "attend\n--rank\n1\n--world\n4\n--coordinator\n[fd00::1]:29600\n--mask\nvalid:3,4"),
        ],
        other => panic!("{other} has no corpus"),
    };
    texts.iter().map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec())).collect()
}

/// What a target may hold: what it decodes may be larger than its text, and clap's own command line is large.
fn limit(target: &str) -> Limit {
    match target {
        // At most 4096 hosts of at most 253 letters each, several times.
        "nodelist" => Limit { fixed: 8 << 20, per_byte: 64 },
        "arguments" => Limit { fixed: 2 << 20, per_byte: 64 },
        _ => Limit { fixed: 64 << 10, per_byte: 256 },
    }
}

#[test]
fn files_variables_and_arguments_of_any_bytes() {
    for (name, target) in ALL {
        let times = run(name, &corpus(name, &made(name)), limit(name), target);
        println!("{name}: {times} calls");
        assert!(times > 100, "{name}: {times}");
    }
}
