//! `docs/errors.md`: every refusal, with the message that the program really prints. Linux only, because some messages
//! quote the operating system.

mod backward;
mod benches;
mod bias;
mod caches;
mod files;
mod library;
mod network;
mod outputs;
mod placements;
mod requests;
mod sessions;
mod shares;
mod sites;

use std::path::Path;

use crate::holds::holds;
use crate::support::*;

/// Messages of one kind.
struct Group {
    title: &'static str,
    about: &'static str,
    /// The cause of each message, and its meaning.
    entries: &'static [(&'static str, &'static str)],
}

/// A message of the index.
struct Entry {
    when: String,
    sentence: String,
    means: &'static str,
}

/// Refusals that no command line on this machine can cause, by their text in the source.
const NOT_PROVOKED: &[(&str, &str)] = &[
    ("a wgpu device with {name} = {has}", OWN_DEVICE),
    ("a buffer with the usages {:?}", OWN_DEVICE),
    ("a wgpu buffer for {}", OWN_DEVICE),
    ("a backward pass on {} ({})", "a gradient in a browser tab"),
    ("the gradient of a bias tensor on {} ({})", "a backend of another program, without a kernel for it"),
    ("the gradient of a bias, in a backward call without an additive bias tensor", CALLERS),
    ("the gradient of a bias on CUDA, in a backward call without an additive bias tensor", CALLERS),
    (
        "rank {rank} describes its call in a form that this release does not know",
        "a group of ranks with different releases",
    ),
    (
        "rank {rank} describes its cache in a form that this release does not know",
        "a group of ranks with different releases",
    ),
    (
        "rank {rank} describes its device in a form that this release does not know",
        "a group of ranks with different releases",
    ),
    ("a bias tensor with an extent of {value}", "a tensor of 4,294,967,296 batch entries or heads"),
    ("a rank whose keys have no rows for its tokens", "a group of ranks with different releases"),
    (
        "rank {rank} describes its call in a form that this release of kyklos does not know",
        "a group of ranks with different releases",
    ),
    (
        "the plan of rank {rank} takes {}, and the {ranks} ranks of its machine share {}",
        "ranks whose tensors fit the memory of their machine and whose plans do not; the numbers are those of the machine",
    ),
    (
        "{label}: rank {rank} has {theirs}, rank 0 has {ours}",
        "ranks that were started with different releases, options, sinks or tokens; every rank says it",
    ),
    (
        "rank {} has other bytes in tensor `{}` of its input file than rank {}",
        "ranks that were started with different input files; every rank says it, before any tensor is sent",
    ),
    ("more tokens in a cache than it has positions", "caches of more than 2^31 tokens"),
    (
        "a cache whose tensors were lost in a call that was dropped before its end",
        "a bug: a dropped call gives them back",
    ),
    ("an extent of {value}", "tensors of more than 2^32 tokens or heads"),
    ("{sum} tokens over all ranks", "groups of more than 2^32 tokens"),
    ("no mesh of {} ranks", "nobody: every number of ranks has a mesh"),
    ("head dim {head_dim} on {}", "an NVIDIA GPU, and a head dim above 256"),
    (
        "there is no wgpu device {index}: this machine has {count}",
        "callers of the library; the program looks first",
    ),
    (
        "{} cannot run the subgroup-broadcast kernel: a {:?} with subgroups of {} to {}",
        "a device whose subgroups do not fit, and `--kernel subgroup`",
    ),
    (
        "{} cannot run the cooperative-matrix kernel: its driver lists {:?}, its subgroups have {} to {} lanes",
        "a device without such matrices, and `--kernel cooperative`",
    ),
    ("{} has no kernel {}", "a device that has others, and `--kernel` with one that it has not"),
    (
        "shapes {:?} and {shape:?} in {dtype} share one choice",
        "a wgpu device, and `tune` with two shapes of one size",
    ),
    (
        "rank 0 cannot be found at {host}: {why}",
        "a name that no resolver knows; the reason is the resolver's",
    ),
    ("a description cannot be written as TOML: {error}", "a bug"),
    ("the work list is in tiles of {:?}, the kernel's are {tile:?}", CALLERS),
    ("the work list is in tiles of {:?}, the backward kernels' are {tile:?}", CALLERS),
    ("{what} reaches to byte {} of a buffer of {}", CALLERS),
    ("{groups} workgroups", CALLERS),
    ("bytes {range:?} of a buffer of {}", CALLERS),
    ("{} query rows have no kernels to choose from", CALLERS),
    ("a write of {} bytes at byte {offset}", CALLERS),
    ("{layout:?} does not keep heads on 16-byte boundaries", CALLERS),
    ("a copy of {extent:?} from {from:?} into {into:?}", CALLERS),
    ("{:?} (in bytes) does not keep heads on 16-byte boundaries", CALLERS),
    ("the work list is in tiles of {tile:?}, kernels for this call have {tiles:?}", CALLERS),
    ("{tensor:?} does not keep heads on 16-byte boundaries", CALLERS),
    ("a write of {} bytes at byte {offset} of a buffer of {}", CALLERS),
    ("a copy or a sum of {extent:?} from {from_layout:?} into {into_layout:?}", CALLERS),
    ("zeros for {bytes} bytes", CALLERS),
    ("the work list is in tiles of {:?}, not of {BACKWARD_TILE:?}", CALLERS),
    ("gradients with head dim {dim} on CUDA", "a gradient on an NVIDIA GPU"),
    (
        "device cuda:{ordinal} does not exist, this machine has {found}",
        "callers of the library; the program looks first",
    ),
    (
        "no kernels for {}: {}",
        "an NVIDIA GPU, and a program that was built without nvcc where there is no NVRTC",
    ),
    ("{name} has {}, and the device uses none of them ({words})", OWN_KERNELS),
    ("{device} does not load {what}: {error}", OWN_KERNELS),
    ("{} replaces no kernels: {why}", OWN_KERNELS),
    ("a conversion from or to element {first} on, kernels take eight at a time", CALLERS),
    ("a conversion of {bytes} bytes of {what} in a buffer of {}", CALLERS),
    ("no kernel converts {elements} elements of {} to {}", CALLERS),
    ("no kernel makes codes of heads of {dim}", CALLERS),
    ("a copy between CUDA devices from or to {}", CALLERS),
    ("a message of {} by NCCL of another device", CALLERS),
    (
        "plans for NCCL, which carries out one exchange after the other ({error})",
        "plans that no strategy of this library makes",
    ),
    ("memory of a CUDA device for {}", OWN_MEMORY),
    ("the address {address:#x}, which the driver does not know", OWN_MEMORY),
    ("the address {address:#x}, which is memory of the host", OWN_MEMORY),
    ("the address {address:#x} of cuda:{ordinal} for cuda:{}", OWN_MEMORY),
    ("the address {address:#x}, which belongs to another context", OWN_MEMORY),
    ("the address {address:#x}, which is no multiple of {ALIGNMENT}", OWN_MEMORY),
    ("{bytes} bytes at the address {address:#x}, where {} are allocated", OWN_MEMORY),
    ("a tensor of shape {shape:?} in {dtype} with strides {strides:?}", OWN_MEMORY),
    ("a stream that is not of the primary context of {}", OWN_MEMORY),
    ("a stream that captures a CUDA graph", OWN_MEMORY),
    ("a CUDA stream for a tensor that is not on a CUDA device", OWN_MEMORY),
    ("a CUDA stream for {}", OWN_MEMORY),
];
const OWN_KERNELS: &str = "developers of kernels, who name a file in KYKLOS_CUDA_IMAGE, on an NVIDIA GPU";
const OWN_MEMORY: &str = "callers of the library that bring their own CUDA memory and streams";
const OWN_DEVICE: &str = "callers of the library that bring their own wgpu device";
const CALLERS: &str = "callers of a GPU backend's own operations, which plans do not make";

#[test]
fn the_index_of_errors_is_complete_and_as_printed() {
    let folder = tempfile::tempdir().unwrap();
    files::make(folder.path());
    let mut out = HEAD.to_owned();
    let mut sentences = Vec::new();
    for Group { title, about, entries } in requests::GROUPS {
        section(&mut out, title, about);
        for (when, means) in *entries {
            let sentence = provoke(when, folder.path());
            line(&mut out, &Entry { when: (*when).to_owned(), sentence: sentence.clone(), means });
            sentences.push(sentence);
        }
    }
    section(
        &mut out,
        "Calls of the library",
        "`Error::Request`, before any data is sent, like all refusals above.",
    );
    for entry in library::refusals()
        .into_iter()
        .chain(placements::refusals())
        .chain(bias::refusals())
        .chain(sessions::refusals())
        .chain(shares::refusals())
        .chain(caches::refusals())
        .chain(backward::refusals())
    {
        line(&mut out, &entry);
        sentences.push(entry.sentence);
    }
    section(&mut out, "Groups that do not form", "Exit code 1, on every process that has started.");
    library::of_groups().iter().for_each(|entry| line(&mut out, entry));
    section(&mut out, "Runs that end", ENDS);
    library::of_runs().iter().for_each(|entry| line(&mut out, entry));

    let sites = sites::all();
    let missing: Vec<&sites::Site> =
        sites.iter().filter(|site| !sentences.iter().any(|sentence| site.may_say(sentence))).collect();
    section(
        &mut out,
        "Not provoked here",
        "Messages in the source that no line above prints, and when they appear.",
    );
    for (text, why) in NOT_PROVOKED {
        assert!(
            missing.iter().any(|site| site.text == *text),
            "`{text}` is provoked now, or gone: take it out of the list"
        );
        out.push_str(&format!("- `{text}`: {why}\n"));
    }
    let unknown: Vec<String> = missing
        .iter()
        .filter(|site| !NOT_PROVOKED.iter().any(|(text, _)| *text == site.text))
        .map(|site| format!("{}: {}", site.at, site.text))
        .collect();
    assert!(
        unknown.is_empty(),
        "refusals that the index does not know; provoke them in requests.rs or library.rs:\n{}",
        unknown.join("\n")
    );
    out.push_str(&format!(
        "\nPlaces in the source that refuse: {}; not provoked: {}.\n",
        sites.len(),
        missing.len()
    ));
    holds("docs/errors.md", &out);
}

fn section(out: &mut String, title: &str, about: &str) {
    out.push_str(&format!("\n## {title}\n\n"));
    if !about.is_empty() {
        out.push_str(&format!("{about}\n\n"));
    }
}

fn line(out: &mut String, Entry { when, sentence, means }: &Entry) {
    // The index is the same on every machine.
    let sentence = sentence.replace(&kyklos::machine::processor_name(), "PROCESSOR");
    out.push_str(&format!(
        "- `{when}`<br>\n  **{}**<br>\n  {means}\n",
        sentence.replace('*', "\\*").replace('<', "&lt;")
    ));
}

/// Runs a command line and returns the one sentence of its refusal.
fn provoke(when: &str, folder: &Path) -> String {
    let path = folder.to_str().unwrap();
    let (mut variables, mut arguments) = (Vec::new(), Vec::new());
    for word in when.split(' ') {
        match word {
            "@" => arguments.extend("attend --shape 1,64,8,2,64".split(' ').map(str::to_owned)),
            "*" => arguments.extend(
                "plan --explain --shape 1,64,8,2,64 --ranks 2 --hardware".split(' ').map(str::to_owned),
            ),
            _ => match word.split_once('=') {
                Some(variable) if arguments.is_empty() => variables.push(variable),
                _ => arguments.push(word.replace("DIR", path)),
            },
        }
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut command = command(&arguments);
    command.envs(variables).current_dir(folder);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let output = finish(command.spawn().unwrap(), std::time::Duration::from_secs(120));
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{when}: {text}");
    assert_eq!(stdout(&output), "", "{when}");
    let sentence = text.lines().last().unwrap_or_default().strip_prefix("error: ");
    let sentence = sentence.unwrap_or_else(|| panic!("{when}: {text}")).replace(path, "DIR");
    // The memory size differs between machines.
    match sentence
        .split_once("this machine has ")
        .and_then(|(all, rest)| Some((all, rest.split_once(':')?.1)))
    {
        Some((needs, remedy)) => format!("{needs}this machine has …:{remedy}"),
        None => sentence,
    }
}

const HEAD: &str = "# Errors

A test provokes every message on this page and compares the page with the output (`KYKLOS_BLESS=1` rewrites the page). It fails if
a refusal in the source is missing here. A refusal is one line on standard error with exit code 2: the mismatch, a colon,
and the remedy. The program refuses before it sends data; under a launcher every rank ends with the same message. Exit code 1
is a run that failed, see the end.

`DIR` is a folder; `@` stands for `attend --shape 1,64,8,2,64`. Words with `=` at the start are environment variables. Errors
of the command-line parser about unknown or contradictory options are not listed.
";

const ENDS: &str = "Exit code 1. Ends on all ranks with the same error; rank and step say where. Not \
                    provoked here: a device that is lost (`DEVICE: OPERATION failed: the message of the driver`: update or restart the \
                    driver, open the device again).";
