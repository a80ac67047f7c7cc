//! Files of the workspace.

use std::path::{Path, PathBuf};

/// All files under a folder but those of hidden folders and of `target`, sorted.
pub(crate) fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && name != "node_modules" && !name.starts_with('.') {
                found.extend(files(&path));
            }
        } else {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The Rust sources among them.
pub(crate) fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut found = files(folder);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    found
}

/// The text of a file, empty where there is none.
pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

pub(crate) fn relative(root: &Path, file: &Path) -> String {
    file.strip_prefix(root).unwrap_or(file).display().to_string()
}

/// The folders of the packages of the workspace, by the root manifest; `demos/*` is every folder
/// with a manifest.
pub(crate) fn packages(root: &Path) -> Vec<PathBuf> {
    let manifest = read(&root.join("Cargo.toml"));
    let members = manifest.split_once("\nmembers = [").map_or("", |(_, after)| after);
    let members = members.split(']').next().unwrap_or_default();
    let mut found = Vec::new();
    for member in members.split('"').skip(1).step_by(2) {
        match member.strip_suffix("/*") {
            Some(folder) => {
                let below = std::fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
                found.extend(below.map(|entry| Path::new(folder).join(entry.file_name())));
            }
            None => found.push(PathBuf::from(member)),
        }
    }
    found.retain(|package| root.join(package).join("Cargo.toml").exists());
    found.sort();
    found
}
