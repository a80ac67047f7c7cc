//! One crate, read from its root file: the tree of its modules, with what each module defines,
//! imports and names.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::names::{Names, is_for_tests};

/// The position of a module in [`Sources::modules`].
pub(crate) type ModuleId = usize;

/// The position of a file in [`Sources::files`].
pub(crate) type FileId = usize;

/// A module that is no test: a file, or a block in a file.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) parent: Option<ModuleId>,
    pub(crate) file: FileId,
    pub(crate) children: BTreeMap<String, ModuleId>,
    pub(crate) names: Names,
}

/// All modules of all crates that were read.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// Relative to the root of the workspace.
    pub(crate) files: Vec<PathBuf>,
    /// The folder that each file belongs to: `plan.rs` belongs to `plan/` where there is one.
    pub(crate) folders: Vec<PathBuf>,
    pub(crate) modules: Vec<Module>,
    /// The root modules of libraries, by the name under which other crates use them.
    pub(crate) libraries: BTreeMap<String, ModuleId>,
    /// What could not be read.
    pub(crate) faults: Vec<String>,
}

impl Sources {
    /// Reads the modules of a crate. `library` is the name of a library, `None` for programs,
    /// benches and examples.
    pub(crate) fn read_crate(&mut self, root: &Path, file: &Path, library: Option<&str>) {
        let folder = file.parent().unwrap_or(Path::new("")).to_owned();
        if let Some(id) = self.read_module(root, file, &folder, None)
            && let Some(name) = library
        {
            self.libraries.insert(name.to_owned(), id);
        }
    }

    /// `folder` is where the files of child modules are.
    fn read_module(
        &mut self,
        root: &Path,
        file: &Path,
        folder: &Path,
        parent: Option<ModuleId>,
    ) -> Option<ModuleId> {
        let text = match fs::read_to_string(root.join(file)) {
            Ok(text) => text,
            Err(error) => {
                self.faults.push(format!("{}: cannot be read: {error}", file.display()));
                return None;
            }
        };
        let parsed = match syn::parse_file(&text) {
            Ok(parsed) => parsed,
            Err(error) => {
                let line = error.span().start().line;
                self.faults.push(format!("{}:{line}: cannot be parsed: {error}", file.display()));
                return None;
            }
        };
        let file_id = self.files.len();
        self.files.push(file.to_owned());
        self.folders.push(file.parent().unwrap_or(Path::new("")).to_owned());
        let id = self.add_items(root, &parsed.items, file_id, folder, parent);
        let has_files = self.modules[id].children.values().any(|&child| self.modules[child].file != file_id);
        if has_files {
            self.folders[file_id] = folder.to_owned();
        }
        Some(id)
    }

    fn add_items(
        &mut self,
        root: &Path,
        items: &[syn::Item],
        file: FileId,
        folder: &Path,
        parent: Option<ModuleId>,
    ) -> ModuleId {
        let id = self.modules.len();
        let names = Names::of(items);
        self.modules.push(Module { parent, file, children: BTreeMap::new(), names });
        for item in items {
            let syn::Item::Mod(declared) = item else { continue };
            if is_for_tests(&declared.attrs) {
                continue;
            }
            let name = declared.ident.to_string();
            let child_folder = folder.join(&name);
            let child = match &declared.content {
                Some((_, items)) => Some(self.add_items(root, items, file, &child_folder, Some(id))),
                None => {
                    let path = file_of(root, folder, &self.files[file], declared);
                    let below = match path.file_name() {
                        Some(last) if last == "mod.rs" => path.parent().unwrap_or(folder).to_owned(),
                        _ => path.with_extension(""),
                    };
                    self.read_module(root, &path, &below, Some(id))
                }
            };
            if let Some(child) = child {
                // The first of several that conditions choose from.
                self.modules[id].children.entry(name).or_insert(child);
            }
        }
        id
    }

    /// The root module of a module's crate.
    pub(crate) fn root_of(&self, mut module: ModuleId) -> ModuleId {
        while let Some(parent) = self.modules[module].parent {
            module = parent;
        }
        module
    }

    /// Whether a module is below one that this file holds.
    pub(crate) fn is_within(&self, module: ModuleId, file: FileId) -> bool {
        let mut outer = self.modules[module].parent;
        while let Some(id) = outer {
            if self.modules[id].file == file {
                return true;
            }
            outer = self.modules[id].parent;
        }
        false
    }

    /// Files under a folder, by position.
    pub(crate) fn files_in(&self, folder: &Path) -> BTreeSet<FileId> {
        (0..self.files.len())
            .filter(|&id| self.files[id].starts_with(folder) || self.folders[id].starts_with(folder))
            .collect()
    }
}

/// The file of a module that is declared without a body.
fn file_of(root: &Path, folder: &Path, declared_in: &Path, declared: &syn::ItemMod) -> PathBuf {
    let given = declared.attrs.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    });
    if let Some(given) = given {
        return declared_in.parent().unwrap_or(Path::new("")).join(given);
    }
    let flat = folder.join(format!("{}.rs", declared.ident));
    if root.join(&flat).exists() { flat } else { folder.join(declared.ident.to_string()).join("mod.rs") }
}
