//! Input and output files.

use std::path::Path;

use crate::support::*;

#[test]
fn a_file_goes_round_and_comes_back_right() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let q = Tensor::made(&[2, 37, 4, 8], 1);
    let (k, v) = (Tensor::made(&[2, 37, 2, 8], 2), Tensor::made(&[2, 37, 2, 8], 3));
    write(&input, &[("q", &q), ("k", &k), ("v", &v), ("extra", &k)]);
    // Rows from 30 on of batch entry 1 see no key.
    let (o, lse) = attention(&q, &k, &v, |b, i, j| j <= i && i - j <= 3 && j < [37, 26][b]);
    for (mesh, placement) in [("1x1", "auto"), ("1x3", "zigzag"), ("2x2", "striped"), ("4x1", "contiguous")] {
        let result = kyklos(&[
            "attend",
            "--input",
            input.to_str().unwrap(),
            "--output",
            output.to_str().unwrap(),
            "--mask",
            "causal+window:3,-1+valid:37,26",
            "--mesh",
            mesh,
            "--placement",
            placement,
            "--device",
            "cpu",
            "--verify",
        ]);
        succeeds(&result);
        assert!(stderr(&result).contains("extra"), "a tensor that is not used is named");
        assert_close(&read(&output, "o"), &o);
        assert_close(&read(&output, "lse"), &lse);
        std::fs::remove_file(&output).unwrap();
    }
    assert!(lse.data.contains(&f32::NEG_INFINITY));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing but the input is left");
}

#[test]
fn sinks_of_a_file_are_counted_once_in_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let q = Tensor::made(&[2, 21, 4, 8], 1);
    let (k, v) = (Tensor::made(&[2, 21, 2, 8], 2), Tensor::made(&[2, 21, 2, 8], 3));
    let sinks = Tensor { shape: vec![4], data: vec![0.5, -3.0, 2.0, 6.0] };
    write(&input, &[("q", &q), ("k", &k), ("v", &v), ("sinks", &sinks)]);
    // Batch entry 1 has no valid key, only its sinks.
    let (mut o, mut lse) = attention(&q, &k, &v, |b, i, j| j <= i && b == 0);
    // A sink is one more exponential in the denominator.
    for (row, lse) in lse.data.iter_mut().enumerate() {
        let (batch, head, token) = (row / 21 / 4, row / 21 % 4, row % 21);
        let with = (lse.exp() + sinks.data[head].exp()).ln();
        let at = ((batch * 21 + token) * 4 + head) * 8;
        o.data[at..at + 8].iter_mut().for_each(|o| *o *= (*lse - with).exp());
        *lse = with;
    }
    for mesh in ["1x1", "1x3", "2x2", "4x1"] {
        succeeds(&kyklos(&[
            "attend",
            "--input",
            input.to_str().unwrap(),
            "--output",
            output.to_str().unwrap(),
            "--mask",
            "causal+valid:21,0",
            "--mesh",
            mesh,
            "--device",
            "cpu",
            "--verify",
        ]));
        assert_close(&read(&output, "o"), &o);
        assert_close(&read(&output, "lse"), &lse);
    }
}

#[test]
fn a_mask_or_a_bias_of_a_file_is_honoured_in_every_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let q = Tensor::made(&[2, 21, 4, 8], 1);
    let (k, v) = (Tensor::made(&[2, 35, 2, 8], 2), Tensor::made(&[2, 35, 2, 8], 3));
    // The last ones have one row for all queries; the mask also as `[batch, keys]`.
    let shapes: [(&str, &[usize]); 5] = [
        ("mask", &[2, 1, 21, 35]),
        ("bias", &[1, 4, 21, 35]),
        ("mask", &[2, 1, 1, 35]),
        ("mask", &[2, 35]),
        ("bias", &[1, 4, 1, 35]),
    ];
    for (name, shape) in shapes {
        let [batch, heads, queries] = match shape {
            [batch, _] => [*batch, 1, 1],
            _ => [shape[0], shape[1], shape[2]],
        };
        let mut bias = Tensor::made(shape, 7);
        for (index, x) in bias.data.iter_mut().enumerate() {
            let row = index / 35;
            // A query that sees nothing, or the second of two entries.
            let unseen = if queries == 1 { batch == 2 && row == 1 } else { row % 21 == 5 };
            let hidden = *x > 0.5 || unseen || (queries == 1 && (index % 35 + 7 * row) % 11 < 5);
            *x = match (name, hidden) {
                ("mask", _) => f32::from(u8::from(!hidden)),
                (_, true) => f32::NEG_INFINITY,
                (_, false) => *x,
            };
        }
        write(&input, &[("q", &q), ("k", &k), ("v", &v), (name, &bias)]);
        let (o, lse) = attention_with(&q, &k, &v, |b, h, i, j| {
            let row = ((b % batch) * heads + h % heads) * queries + i % queries;
            let x = bias.data[row * 35 + j];
            let (hidden, term) = if name == "mask" { (x == 0.0, 0.0) } else { (x == f32::NEG_INFINITY, x) };
            (j <= i + 10 && !hidden).then_some(term)
        });
        for (mesh, placement) in
            [("1x1", "auto"), ("1x3", "zigzag"), ("2x2", "striped"), ("3x1", "contiguous")]
        {
            succeeds(&kyklos(&[
                "attend",
                "--input",
                input.to_str().unwrap(),
                "--output",
                output.to_str().unwrap(),
                "--mask",
                "causal",
                "--q-offset",
                "10",
                "--mesh",
                mesh,
                "--placement",
                placement,
                "--device",
                "cpu",
                "--verify",
            ]));
            assert_close(&read(&output, "o"), &o);
            assert_close(&read(&output, "lse"), &lse);
        }
        let unseen = queries > 1 || batch == 2;
        assert!(!unseen || lse.data.contains(&f32::NEG_INFINITY), "a row sees nothing");
    }
}

#[test]
fn queries_may_be_fewer_than_keys() {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("in"), folder.path().join("out"));
    let q = Tensor::made(&[1, 5, 2, 8], 4);
    let (k, v) = (Tensor::made(&[1, 23, 1, 8], 5), Tensor::made(&[1, 23, 1, 8], 6));
    write(&input, &[("q", &q), ("k", &k), ("v", &v)]);
    let result = kyklos(&[
        "attend",
        "--input",
        input.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
        "--mask",
        "causal",
        "--q-offset",
        "18",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--verify",
    ]);
    succeeds(&result);
    let (o, lse) = attention(&q, &k, &v, |_, i, j| j <= i + 18);
    assert_close(&read(&output, "o"), &o);
    assert_close(&read(&output, "lse"), &lse);
}

#[test]
fn parts_say_which_positions_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let name = |rank: &str| folder.path().join(format!("part-{rank}"));
    let whole = folder.path().join("whole");
    let run = |output: &Path| {
        succeeds(&kyklos(&[
            "attend",
            "--shape",
            "2,21,4,2,8",
            "--mask",
            "causal",
            "--mesh",
            "1x3",
            "--output",
            output.to_str().unwrap(),
            "--device",
            "cpu",
        ]));
    };
    run(&name("{rank}"));
    run(&whole);
    let (o, lse) = (read(&whole, "o"), read(&whole, "lse"));
    let mut seen = Vec::new();
    for rank in ["0", "1", "2"] {
        let path = name(rank);
        let (part_o, part_lse, positions) = (read(&path, "o"), read(&path, "lse"), positions(&path));
        let n = positions.len();
        assert_eq!((part_o.shape, part_lse.shape), (vec![2, n, 4, 8], vec![2, 4, n]));
        for (row, position) in positions.iter().enumerate() {
            let position = *position as usize;
            for b in 0..2 {
                let (from, to) = ((b * n + row) * 32, (b * 21 + position) * 32);
                assert_eq!(part_o.data[from..from + 32], o.data[to..to + 32]);
                for h in 0..4 {
                    assert_eq!(part_lse.data[(b * 4 + h) * n + row], lse.data[(b * 4 + h) * 21 + position]);
                }
            }
        }
        seen.extend(positions);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..21).collect::<Vec<_>>());
}

/// Scores beyond the largest f32. The result of every device is wrong, and the f64 oracle is right.
const WRONG: [&str; 8] =
    ["--shape", "1,64,4,2,8", "--scale", "3e38", "--verify", "--json", "--device", "cpu"];

#[test]
fn a_result_that_is_known_to_be_wrong_gets_no_name() {
    let folder = tempfile::tempdir().unwrap();
    for (command, ranks) in
        [(&["attend"][..], &["--ranks", "3"][..]), (&["launch", "-n", "3", "--", "attend"], &[])]
    {
        for name in ["whole", "part-{rank}"] {
            let target = folder.path().join(name);
            let output = ["--output", target.to_str().unwrap()];
            let result = kyklos(&[command, &WRONG, ranks, &output].concat());
            let text = stderr(&result);
            assert_eq!(result.status.code(), Some(1), "{text}");
            assert!(text.contains("verification failed"), "{text}");
            // The report still has the measurements.
            let report: serde_json::Value = serde_json::from_str(&stdout(&result)).unwrap();
            assert_eq!(report["ranks"], 3);
            if command[0] == "launch" && name.contains("{rank}") {
                for rank in 0..3 {
                    let own = format!("[{rank}] error: verification failed");
                    assert!(text.contains(&own), "a rank without its part has failed: {text}");
                }
            }
            assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "{command:?} leaves {name}");
        }
    }
}

#[test]
fn parts_get_their_names_together_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("{rank}/part");
    // Rank 1 has no place for its output.
    std::fs::create_dir(folder.path().join("0")).unwrap();
    let result = kyklos(&[
        "attend",
        "--shape",
        "1,32,2,2,8",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--output",
        target.to_str().unwrap(),
    ]);
    assert_eq!(result.status.code(), Some(2), "{}", stderr(&result));
    assert!(stderr(&result).contains("rank 1: cannot write"), "{}", stderr(&result));
    assert_eq!(std::fs::read_dir(folder.path().join("0")).unwrap().count(), 0);
}

#[test]
fn a_result_that_cannot_be_written_is_an_error_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("missing/out");
    let result = kyklos(&[
        "attend",
        "--shape",
        "1,32,2,2,8",
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--output",
        target.to_str().unwrap(),
    ]);
    assert_eq!(result.status.code(), Some(2), "{}", stderr(&result));
    assert!(stderr(&result).contains("missing"), "{}", stderr(&result));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
