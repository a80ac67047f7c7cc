//! Planted bugs: the kernel's text is changed in one place, and the tests must say that it is wrong. What has never found
//! a bug proves nothing.

use std::path::{Path, PathBuf};

use half::bf16;
use kyklos::Dtype;
use kyklos_tests::inputs::{Case, cases};
use kyklos_tests::oracle::{OracleMask, OracleTerm};

use crate::call::{Call, Keys};
use crate::job::Timing;
use crate::parallel::in_parallel;
use crate::program::Program;

/// A change of one place in a file of `kernels/`.
struct Fault {
    what: &'static str,
    file: &'static str,
    from: &'static str,
    into: &'static str,
}

const fn fault(what: &'static str, file: &'static str, from: &'static str, into: &'static str) -> Fault {
    Fault { what, file, from, into }
}

const FAULTS: [Fault; 22] = [
    fault("copies are not waited for", "attend.h", "copy_async_wait<0>();", ""),
    fault(
        "one group too many may be under way",
        "attend.h",
        "copy_async_wait<0>();",
        "copy_async_wait<1>();",
    ),
    fault(
        "no barrier between the copies of all threads and their readers",
        "attend.h",
        "const bool odd = barrier_or(tested && copied_odd(v_from));",
        "const bool odd = false;",
    ),
    fault(
        "the next tile goes to the stage that is being read",
        "attend.h",
        "copy_keys(stages + (step + 1) % 2 * 2 * TILE_BYTES",
        "copy_keys(stages + step % 2 * 2 * TILE_BYTES",
    ),
    fault("what was summed is not scaled to a new maximum", "attend.h", "acc[j][2 * half] *= rescale;", ""),
    fault(
        "the sum of weights is not scaled",
        "attend.h",
        "fused(sum[half], rescale, sum_here)",
        "sum[half] + sum_here",
    ),
    fault(
        "rows of keys in the order of those of values",
        "attend.h",
        "k_from + place(16 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2)",
        "k_from + place(16 * n + lane % 16, 2 * k + lane / 16)",
    ),
    fault(
        "columns of queries swapped",
        "attend.h",
        "lane % 16, 2 * k + lane / 16));\n        UNROLL",
        "lane % 16, 2 * k + 1 - lane / 16));\n        UNROLL",
    ),
    fault("values are not transposed", "attend.h", "load_matrices_transposed(v,", "load_matrices(v,"),
    fault(
        "tiles are written without the twist",
        "attend.h",
        "copy_async(into + place(row, column)",
        "copy_async(into + (row * COLUMNS + column) * 16",
    ),
    fault(
        "halves of the weights swapped",
        "attend.h",
        "T::pack(weights[2 * k][2], weights[2 * k][3]),",
        "T::pack(weights[2 * k + 1][0], weights[2 * k + 1][1]),",
    ),
    fault("the maximum of two of four lanes", "attend.h", "most = larger(most, shuffle_xor(most, 2));", ""),
    fault("the sum of two of four lanes", "attend.h", "sum[half] += shuffle_xor(sum[half], 2);", ""),
    fault("a row sees one key more", "logits.h", "position >= span.hi", "position > span.hi"),
    fault("a row sees one key less", "logits.h", "position < span.lo", "position <= span.lo"),
    fault(
        "no tile is tested",
        "attend.h",
        "tested = !tiles.full() || first_key + KEYS > args.keys || args.pair_kind != NO_PAIRS;",
        "tested = false;",
    ),
    fault(
        "the ragged end of full tiles is not tested",
        "attend.h",
        "!tiles.full() || first_key + KEYS > args.keys ||",
        "!tiles.full() ||",
    ),
    fault("a lane writes before its row's others have read", "attend.h", "warp_sync();", ""),
    fault(
        "hidden values that are NaN are multiplied by 0",
        "attend.h",
        "barrier_or(tested && copied_odd(v_from))",
        "barrier_or(false)",
    ),
    fault("the state that was there is forgotten", "logits.h", "l += old_l * keep;", ""),
    fault(
        "rows behind the last are written",
        "attend.h",
        "if (!there || entry.nothing) continue;",
        "if (entry.nothing) continue;",
    ),
    fault(
        "query heads read the KV head of their own number",
        "logits.h",
        "kv_head(args.kv_head_of[head])",
        "kv_head(head / 2)",
    ),
];

/// Changes that are no bugs: the same answers, slower. The counters have to show them.
const SLOWER: Fault =
    fault("no twist at all", "attend.h", "COLUMNS % 8 == 0 ? row & 7 : row >> 1 & 3", "row & 0");

/// What is compiled of a changed kernel: one instance.
const INSTANCE: &str = "#include \"attend.h\"\n#include \"state.h\"\n\
    KERNEL(attend_bf16_64, AttendArguments, (Attention<Bf16, 64>::THREADS)) { Attention<Bf16, 64>(args).run(); }\n\
    KERNEL(reset_state, StateArguments, StateRow::THREADS) { reset(args); }\n\
    KERNEL(finalize_bf16, StateArguments, StateRow::THREADS) { finalize<Bf16>(args); }\n";

/// The emulator with changed kernels.
fn planted(faults: &[&Fault], name: &str) -> Program {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("planted").join(name);
    std::fs::create_dir_all(&folder).unwrap();
    for entry in std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels")).unwrap().flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "h") {
            continue;
        }
        let file = entry.file_name().into_string().unwrap();
        let mut text = std::fs::read_to_string(&path).unwrap();
        for fault in faults.iter().filter(|fault| fault.file == file) {
            assert_eq!(text.matches(fault.from).count(), 1, "{}: `{}` in {file}", fault.what, fault.from);
            text = text.replace(fault.from, fault.into);
        }
        write_if_new(&folder.join(file), &text);
    }
    let instance: PathBuf = folder.join("instance.cu");
    write_if_new(&instance, INSTANCE);
    Program::build(&folder, &[instance])
}

fn write_if_new(path: &Path, text: &str) {
    if std::fs::read_to_string(path).ok().as_deref() != Some(text) {
        std::fs::write(path, text).unwrap();
    }
}

fn case(change: impl FnOnce(&mut Case)) -> Call {
    let mut case = cases().into_iter().find(|case| case.name == "one row beyond a tile").unwrap();
    (case.problem.q_heads, case.problem.kv_heads) = (3, 1);
    change(&mut case);
    Call::new::<bf16>(case, Dtype::Bf16)
}

/// Small calls that together touch what the kernel does.
fn calls() -> Vec<(Call, Keys)> {
    let causal = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len) = (72, 210);
        (case.problem.q_offset, case.problem.mask) = (138, OracleMask::causal());
        // Large enough for maxima to move.
        case.problem.scale *= 4.0;
    };
    let window = |case: &mut Case| {
        (case.problem.q_len, case.problem.kv_len) = (40, 90);
        case.problem.mask = OracleMask::full().and(OracleTerm::Window { left: 9, right: 4 });
    };
    let ragged = |case: &mut Case| (case.problem.q_len, case.problem.kv_len) = (17, 133);
    let nan = cases().into_iter().find(|case| case.name == "NaN in padding").unwrap();
    vec![
        (case(causal), Keys::Whole),
        (case(causal), Keys::Split),
        (case(window), Keys::Whole),
        (case(ragged), Keys::Whole),
        (Call::new::<bf16>(nan, Dtype::Bf16), Keys::Whole),
    ]
}

/// The first call in which a program is found to be wrong.
fn found(program: &Program, calls: &[(Call, Keys)]) -> Option<String> {
    let runs = calls.iter().flat_map(|call| Timing::ALL.map(|timing| (call, timing)));
    runs.map(|((call, keys), timing)| call.judge(program, *keys, timing)).find_map(Result::err)
}

#[test]
fn every_planted_bug_is_found() {
    let calls = calls();
    assert_eq!(found(&planted(&[], "none"), &calls), None, "the kernel as it is");
    let missed = in_parallel(FAULTS.len(), |n| {
        let program = planted(&[&FAULTS[n]], &n.to_string());
        found(&program, &calls).is_none().then(|| FAULTS[n].what)
    });
    assert!(missed.is_empty(), "not found: {missed:?}");
}

#[test]
fn banks_are_read_once_for_each_access_and_the_counter_shows_it() {
    let (call, keys) = &calls()[0];
    let counts = call.judge(&planted(&[], "none"), *keys, Timing::Eager).unwrap();
    assert!(counts.accesses > 0);
    assert_eq!(counts.passes, counts.accesses, "{counts:?}");
    // Without a twist 8 rows of 128 bytes lie in the same banks, and the answers are right all the same.
    let counts = call.judge(&planted(&[&SLOWER], "slower"), *keys, Timing::Eager).unwrap();
    assert_eq!(counts.passes, 8 * counts.accesses, "{counts:?}");
}
