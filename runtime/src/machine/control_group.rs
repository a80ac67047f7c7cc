//! The memory limit of the control group of this process (Linux).
//!
//! A systemd unit, a Slurm step and a container are groups, each inside others. Whatever any of
//! them allows less than the machine has counts.

use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// The least memory limit in bytes for this many processes like this one together, of the group of
/// this process and of all its parents that this process can see. Where this process is alone in
/// its group, so is each of the others in a group like it. `None` without a limit. `root` is `/`;
/// tests have a folder of their own.
pub(crate) fn memory_limit_bytes(root: &Path, processes: u32) -> Option<u64> {
    let groups = read(&root.join("proc/self/cgroup"), MOST_GROUP_BYTES);
    let mounts = read(&root.join("proc/self/mountinfo"), MOST_MOUNT_BYTES);
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    let mut least = None;
    for (version, group) in groups.lines().filter_map(group_with_memory) {
        for mount in mounts.iter().filter(|mount| mount.version == version) {
            for folder in mount.folders_of(&group) {
                let folder = below(root, &folder);
                let limit = read(&folder.join(version.limit_file()), MOST_LIMIT_BYTES);
                // `max` is no number: no limit. A group of 0 bytes runs nothing.
                let limit = limit.trim().parse().ok().filter(|bytes: &u64| *bytes > 0);
                let groups = if is_alone(&folder) { u64::from(processes) } else { 1 };
                let limit = limit.map(|bytes| bytes.saturating_mul(groups));
                least = [least, limit].into_iter().flatten().min();
            }
        }
    }
    least
}

/// Whether this process is the only one of a group, which has no groups inside either.
fn is_alone(folder: &Path) -> bool {
    // More than one number does not parse. A group with threads of other processes cannot be read.
    let processes = read(&folder.join("cgroup.procs"), MOST_LIMIT_BYTES);
    let is_only = processes.trim().parse().is_ok_and(|id: u32| id == std::process::id());
    let mut entries = std::fs::read_dir(folder).into_iter().flatten();
    is_only
        && !entries.any(|entry| entry.is_ok_and(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())))
}

/// The versions of control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// A tree for each controller.
    V1,
    /// One tree.
    V2,
}

impl Version {
    fn limit_file(self) -> &'static str {
        match self {
            Self::V1 => "memory.limit_in_bytes",
            Self::V2 => "memory.max",
        }
    }
}

/// A line of `/proc/self/cgroup`, `number:controllers:path`, of a tree that can limit memory.
fn group_with_memory(line: &str) -> Option<(Version, PathBuf)> {
    let (number, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    let version = match (number, controllers) {
        ("0", "") => Version::V2,
        _ if controllers.split(',').any(|one| one == "memory") => Version::V1,
        _ => return None,
    };
    Some((version, PathBuf::from(path)))
}

/// Where a tree of groups, or a part of one, is in the file system.
#[derive(Debug)]
struct Mount {
    version: Version,
    /// The group that is at `point`. It begins with `..` where that is above the namespace of this
    /// process.
    top: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A line of `/proc/self/mountinfo`: `36 35 98:0 TOP POINT options … - type source options`.
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (top, point) = (unescaped(place.next()?), unescaped(place.next()?));
        let mut kind = kind.split(' ');
        let version = match (kind.next()?, kind.nth(1)?) {
            ("cgroup2", _) => Version::V2,
            ("cgroup", options) if options.split(',').any(|one| one == "memory") => Version::V1,
            _ => return None,
        };
        Some(Self { version, top, point })
    }

    /// The folders of `group` and of its parents, from the inside out. Some may not be there.
    fn folders_of(&self, group: &Path) -> Vec<PathBuf> {
        let named = |path: &Path| path.components().any(|part| matches!(part, Component::Normal(_)));
        let goes_up = |path: &Path| path.components().any(|part| part == Component::ParentDir);
        match group.strip_prefix(&self.top) {
            Ok(inside) if !goes_up(inside) => {
                inside.ancestors().map(|inside| self.point.join(inside)).collect()
            }
            // A parent of the namespace of this process, which hides the names between.
            Err(_) if goes_up(&self.top) && !named(&self.top) => vec![self.point.clone()],
            // Groups of others.
            _ => Vec::new(),
        }
    }
}

/// `path`, which is absolute, in the folder `root`.
fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// The kernel writes space, tab, line feed and backslash of a path as `\` with three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut parts = text.split('\\');
    let mut path = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(char::from(byte));
                path.push_str(&part[3..]);
            }
            None => {
                path.push('\\');
                path.push_str(part);
            }
        }
    }
    PathBuf::from(path)
}

/// What a file says, up to `most` bytes; nothing if it cannot be read.
fn read(path: &Path, most: u64) -> String {
    let mut bytes = Vec::new();
    match File::open(path).and_then(|file| file.take(most).read_to_end(&mut bytes)) {
        Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(_) => String::new(),
    }
}

const MOST_GROUP_BYTES: u64 = 1 << 20;
/// Hosts of many containers have thousands of mounts.
const MOST_MOUNT_BYTES: u64 = 16 << 20;
const MOST_LIMIT_BYTES: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    /// A root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        folder
    }

    fn limit(files: &[(&str, &str)]) -> Option<u64> {
        limit_of(1, files)
    }

    fn limit_of(processes: u32, files: &[(&str, &str)]) -> Option<u64> {
        memory_limit_bytes(root(files).path(), processes)
    }

    const V2: (&str, &str) = (
        "proc/self/mountinfo",
        "24 1 8:1 / / rw - ext4 /dev/sda rw\n30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n",
    );

    #[test]
    fn the_limit_of_a_systemd_unit_counts() {
        let unit = ("proc/self/cgroup", "0::/system.slice/kyklos.service\n");
        let own = ("sys/fs/cgroup/system.slice/kyklos.service/memory.max", "314572800\n");
        assert_eq!(limit(&[V2, unit, own]), Some(314_572_800));
        // Nothing is said of a unit without a limit, and nothing where nothing can be read.
        let unlimited = (own.0, "max\n");
        assert_eq!(limit(&[V2, unit, unlimited]), None);
        assert_eq!(limit(&[V2, unit]), None);
        assert_eq!(limit(&[]), None);
        // Other units do not count.
        let other = ("sys/fs/cgroup/system.slice/other.service/memory.max", "4096\n");
        assert_eq!(limit(&[V2, unit, own, other]), Some(314_572_800));
    }

    #[test]
    fn the_least_of_all_parents_counts() {
        let step = ("proc/self/cgroup", "0::/slurm/job_7/step_0/task_1\n");
        let limits = |job: &'static str, step_0: &'static str| {
            let of = |group: &str| format!("sys/fs/cgroup/slurm/{group}memory.max");
            let (job_file, step_file, task_file) =
                (of("job_7/"), of("job_7/step_0/"), of("job_7/step_0/task_1/"));
            limit(&[V2, step, (&job_file, job), (&step_file, step_0), (&task_file, "max")])
        };
        assert_eq!(limits("1000", "2000"), Some(1000));
        assert_eq!(limits("2000", "1000"), Some(1000));
        assert_eq!(limits("max", "3000"), Some(3000));
    }

    #[test]
    fn the_limit_of_a_process_alone_in_its_group_is_not_that_of_all() {
        let unit = ("proc/self/cgroup", "0::/kyklos.slice/rank-0.service\n");
        let own = ("sys/fs/cgroup/kyklos.slice/rank-0.service/memory.max", "8000\n");
        let slice = |limit| ("sys/fs/cgroup/kyklos.slice/memory.max", limit);
        let me = std::process::id().to_string();
        let two = format!("{me}\n1\n");
        let with = |processes: &str, limit| {
            let there = ("sys/fs/cgroup/kyklos.slice/rank-0.service/cgroup.procs", processes);
            limit_of(2, &[V2, unit, own, slice(limit), there])
        };
        assert_eq!(with(&me, "max"), Some(16_000));
        // What both are in counts for both.
        assert_eq!(with(&me, "10000"), Some(10_000));
        // Together with another process, such as the launcher, or where nothing is told.
        for others in [&two[..], "", "0"] {
            assert_eq!(with(others, "max"), Some(8000), "{others}");
        }
        let alone = ("sys/fs/cgroup/kyklos.slice/rank-0.service/cgroup.procs", &me[..]);
        let inside = ("sys/fs/cgroup/kyklos.slice/rank-0.service/inner/cgroup.procs", "1\n");
        assert_eq!(limit_of(2, &[V2, unit, own, alone, inside]), Some(8000));
    }

    #[test]
    fn the_tree_of_version_1_that_limits_memory_counts() {
        let mounts = (
            "proc/self/mountinfo",
            "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
             35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
             41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
        );
        let groups = ("proc/self/cgroup", "5:cpu:/a\n4:hugetlb,memory:/slurm/uid_0/job_7\n0::/user.slice\n");
        let none = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        let job = ("sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes", "5000\n");
        let cpu = ("sys/fs/cgroup/cpu/a/memory.limit_in_bytes", "7\n");
        assert_eq!(limit(&[mounts, groups, none, job, cpu]), Some(5000));
        assert_eq!(limit(&[mounts, groups, none]), Some(9_223_372_036_854_771_712));
    }

    #[test]
    fn a_container_sees_its_own_part_of_the_tree() {
        let of = |top: &str, group: &str, file: &str| {
            let mounts = format!("30 24 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
            let group = format!("0::{group}\n");
            limit(&[("proc/self/mountinfo", &mounts), ("proc/self/cgroup", &group), (file, "4000\n")])
        };
        let (at_top, inside) = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/inner/memory.max");
        // A namespace of its own, or a mount of its own part.
        assert_eq!(of("/", "/", at_top), Some(4000));
        assert_eq!(of("/docker/7f", "/docker/7f", at_top), Some(4000));
        assert_eq!(of("/docker/7f", "/docker/7f/inner", inside), Some(4000));
        // A path of the host of which only the top is there.
        assert_eq!(of("/", "/docker/7f", at_top), Some(4000));
        // A mount that begins above the namespace.
        assert_eq!(of("/../..", "/", at_top), Some(4000));
        assert_eq!(of("/..", "/../inner", inside), Some(4000));
        // Groups of others.
        assert_eq!(of("/docker/8a", "/docker/7f", at_top), None);
        assert_eq!(of("/", "/../inner", inside), None);
        assert_eq!(of("/../8a", "/", at_top), None);
    }

    #[test]
    fn names_are_as_the_kernel_writes_them() {
        assert_eq!(unescaped(r"/a\040b\134c"), Path::new(r"/a b\c"));
        assert_eq!(unescaped(r"/a\9"), Path::new(r"/a\9"));
        let mounts =
            ("proc/self/mountinfo", "30 24 0:26 / /my\\040groups rw shared:1 master:2 - cgroup2 none rw\n");
        let group = ("proc/self/cgroup", "0::/a b:c\n");
        assert_eq!(limit(&[mounts, group, ("my groups/a b:c/memory.max", "8192")]), Some(8192));
    }

    #[test]
    fn whatever_the_files_say_nothing_panics() {
        for text in [
            "",
            ":",
            "::",
            "0::",
            "0::\n0::/\n",
            "é\\é",
            "1 2 3 / / - cgroup2",
            "a b c d e - cgroup x memory",
        ] {
            for other in [text, V2.1, "0::/x/../../y"] {
                limit(&[("proc/self/cgroup", text), ("proc/self/mountinfo", other)]);
                limit(&[("proc/self/cgroup", other), ("proc/self/mountinfo", text)]);
            }
        }
    }
}
