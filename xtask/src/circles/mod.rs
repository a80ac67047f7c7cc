//! Which file uses which, from the `use` declarations and paths of all crates, and which files use
//! each other in a circle.
//!
//! A name that a module only hands on (`pub use`) is an arrow to the file that defines it, not to
//! the one that hands it on. What a module uses of the modules that it is in is no arrow: children
//! may use what their parent defines, and what the parent uses of its children is an arrow. Tests
//! do not count: neither `#[cfg(test)]` nor the folders `tests/`. Names that are used without being
//! written (methods, macros in textual scope) are not seen.

mod arrows;
mod loops;
mod names;
mod source;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::files::rust_files;

use arrows::{Arrows, arrows};
use loops::loops;
use source::{FileId, Sources};

/// The most files that may use each other in a circle.
pub(crate) const MOST_FILES: usize = 3;

/// The files of all crates, and who uses whom.
#[derive(Debug)]
pub(crate) struct House {
    sources: Sources,
    arrows: Arrows,
}

/// Files that use each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Circle {
    pub(crate) files: Vec<PathBuf>,
    /// What is wrong with it, if anything is.
    pub(crate) fault: Option<String>,
    /// The arrows between its files, one a line.
    pub(crate) arrows: Vec<String>,
}

impl House {
    /// Reads the packages in these folders, which are relative to the root of the workspace.
    pub(crate) fn read(root: &Path, packages: &[PathBuf]) -> Self {
        let mut sources = Sources::default();
        for package in packages {
            let library = package.join("src/lib.rs");
            if root.join(&library).exists() {
                let manifest = std::fs::read_to_string(root.join(package).join("Cargo.toml"));
                let name = package_name(&manifest.unwrap_or_default());
                sources.read_crate(root, &library, Some(&name.replace('-', "_")));
            }
            for program in programs(root, package) {
                sources.read_crate(root, &program, None);
            }
        }
        let arrows = arrows(&sources);
        Self { sources, arrows }
    }

    /// Files that could not be read.
    pub(crate) fn unread(&self) -> &[String] {
        &self.sources.faults
    }

    pub(crate) fn file_count(&self) -> usize {
        self.sources.files.len()
    }

    /// All circles, the largest first.
    pub(crate) fn circles(&self) -> Vec<Circle> {
        let groups = loops(self.sources.files.len(), &self.arrows);
        groups.iter().map(|group| self.circle(group)).collect()
    }

    fn circle(&self, group: &[FileId]) -> Circle {
        let folders: BTreeSet<&Path> = group.iter().map(|&id| self.sources.folders[id].as_path()).collect();
        let mut faults = Vec::new();
        if group.len() > MOST_FILES {
            faults.push(format!("more than {MOST_FILES} files"));
        }
        if folders.len() > 1 {
            let names: Vec<String> = folders.iter().map(|folder| format!("{}/", folder.display())).collect();
            faults.push(format!("across folders ({})", names.join(", ")));
        }
        let mut lines = Vec::new();
        for &from in group {
            for (to, names) in self.arrows.get(&from).into_iter().flatten() {
                if group.contains(to) {
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    lines.push(format!("{} -> {}: {}", self.path(from), self.path(*to), names.join(", ")));
                }
            }
        }
        Circle {
            files: group.iter().map(|&id| self.sources.files[id].clone()).collect(),
            fault: (!faults.is_empty()).then(|| faults.join(", ")),
            arrows: lines,
        }
    }

    /// The shortest way by which a file of one folder (or one file) uses a file of another one,
    /// directly or through others.
    pub(crate) fn way(&self, from: &Path, to: &Path) -> Option<String> {
        let goal = self.sources.files_in(to);
        let mut before: BTreeMap<FileId, FileId> = BTreeMap::new();
        let mut met = self.sources.files_in(from);
        let mut next: Vec<FileId> = met.iter().copied().collect();
        while !next.is_empty() {
            let mut after = Vec::new();
            for &file in &next {
                if goal.contains(&file) {
                    return Some(self.trace(file, &before));
                }
                for &used in self.arrows.get(&file).into_iter().flat_map(BTreeMap::keys) {
                    if met.insert(used) {
                        before.insert(used, file);
                        after.push(used);
                    }
                }
            }
            next = after;
        }
        None
    }

    fn trace(&self, mut file: FileId, before: &BTreeMap<FileId, FileId>) -> String {
        let mut steps = vec![self.path(file)];
        while let Some(&user) = before.get(&file) {
            steps.push(self.path(user));
            file = user;
        }
        steps.reverse();
        steps.join(" -> ")
    }

    /// Whether a rule that names this file or folder names anything.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        !self.sources.files_in(path).is_empty()
    }

    fn path(&self, file: FileId) -> String {
        self.sources.files[file].display().to_string()
    }
}

/// Prints every circle; returns those that are faults.
pub(crate) fn check(house: &House) -> Vec<String> {
    let circles = house.circles();
    for circle in &circles {
        let files: Vec<String> = circle.files.iter().map(|file| file.display().to_string()).collect();
        println!("circle of {} files: {}", files.len(), files.join(", "));
        circle.arrows.iter().for_each(|arrow| println!("    {arrow}"));
    }
    println!("{} files, {} circles", house.file_count(), circles.len());
    let bad = circles.iter().filter_map(|circle| {
        let fault = circle.fault.as_ref()?;
        let files: Vec<String> = circle.files.iter().map(|file| file.display().to_string()).collect();
        Some(format!("circle of {} files, {fault}: {}", files.len(), files.join(", ")))
    });
    house.unread().iter().cloned().chain(bad).collect()
}

/// The root files of a package's programs, benches and examples, and its build script.
fn programs(root: &Path, package: &Path) -> Vec<PathBuf> {
    let mut programs: Vec<PathBuf> =
        ["src/main.rs", "build.rs"].map(|file| package.join(file)).into_iter().collect();
    for folder in ["src/bin", "benches", "examples"] {
        let folder = package.join(folder);
        for file in rust_files(&root.join(&folder)) {
            let file = file.strip_prefix(root).unwrap_or(&file);
            let below = file.strip_prefix(&folder).unwrap_or(file);
            if below.components().count() == 1
                || (below.ends_with("main.rs") && below.components().count() == 2)
            {
                programs.push(file.to_owned());
            }
        }
    }
    programs.retain(|file| root.join(file).exists());
    programs
}

/// The name in a manifest's `[package]`.
pub(crate) fn package_name(manifest: &str) -> String {
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = "));
    name.unwrap_or_default().trim_matches('"').to_owned()
}
