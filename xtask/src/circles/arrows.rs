//! From names to files: an arrow runs from the file that names something to the file that defines
//! it.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{FileId, ModuleId, Sources};

/// From file to file, with the names that the first takes from the second.
pub(crate) type Arrows = BTreeMap<FileId, BTreeMap<FileId, BTreeSet<String>>>;

/// What a name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Meaning {
    Module(ModuleId),
    /// Something that the module defines.
    Item(ModuleId),
}

pub(crate) fn arrows(sources: &Sources) -> Arrows {
    let mut arrows = Arrows::new();
    for (id, module) in sources.modules.iter().enumerate() {
        let mut add = |meanings: BTreeSet<Meaning>, name: &str| {
            for meaning in meanings {
                // A module by itself is no use of its file; what is named in it is.
                let Meaning::Item(definer) = meaning else { continue };
                let to = sources.modules[definer].file;
                if to != module.file && !sources.is_within(id, to) {
                    arrows.entry(module.file).or_default().entry(to).or_default().insert(name.to_owned());
                }
            }
        };
        let names = &module.names;
        for import in &names.imports {
            match &import.name {
                // To hand a name on is no use of it.
                Some(name) if import.is_public && !names.mentioned.contains(name) => {}
                Some(_) => {
                    let last = import.path.last().map_or("", String::as_str);
                    add(sources.resolve(id, &import.path), last);
                }
                None => {
                    let from = sources.resolve(id, &import.path);
                    for meaning in from {
                        let Meaning::Module(from) = meaning else {
                            // The variants of an enum.
                            add(BTreeSet::from([meaning]), import.path.last().map_or("", String::as_str));
                            continue;
                        };
                        let here = |name: &str| {
                            names.defined.contains(name)
                                || module.children.contains_key(name)
                                || names.imports.iter().any(|import| import.name.as_deref() == Some(name))
                        };
                        for name in names.mentioned.iter().filter(|name| !here(name)) {
                            add(sources.look_up(from, name, &mut BTreeSet::new()), name);
                        }
                    }
                }
            }
        }
        for path in &names.paths {
            add(sources.resolve(id, path), path.last().map_or("", String::as_str));
        }
    }
    arrows
}

impl Sources {
    fn resolve(&self, module: ModuleId, path: &[String]) -> BTreeSet<Meaning> {
        self.resolve_once(module, path, &mut BTreeSet::new())
    }

    /// `seen` are the names that are being looked up, which may import each other.
    fn resolve_once(
        &self,
        module: ModuleId,
        path: &[String],
        seen: &mut BTreeSet<(ModuleId, String)>,
    ) -> BTreeSet<Meaning> {
        let Some((first, mut rest)) = path.split_first() else { return BTreeSet::new() };
        let mut meanings = match first.as_str() {
            "crate" => BTreeSet::from([Meaning::Module(self.root_of(module))]),
            "self" => BTreeSet::from([Meaning::Module(module)]),
            "super" => match self.modules[module].parent {
                Some(parent) => BTreeSet::from([Meaning::Module(parent)]),
                None => BTreeSet::new(),
            },
            name => {
                let local = self.look_up(module, name, seen);
                match self.libraries.get(name) {
                    Some(&library) if local.is_empty() => BTreeSet::from([Meaning::Module(library)]),
                    _ => local,
                }
            }
        };
        while let Some((next, after)) = rest.split_first() {
            let within = meanings.iter().find_map(|meaning| match meaning {
                Meaning::Module(within) => Some(*within),
                Meaning::Item(_) => None,
            });
            // What follows an item is a variant, a method or an associated item of it.
            let Some(within) = within else { break };
            meanings = match next.as_str() {
                "super" => self.modules[within].parent.map(Meaning::Module).into_iter().collect(),
                "self" => BTreeSet::from([Meaning::Module(within)]),
                name => self.look_up(within, name, seen),
            };
            if meanings.is_empty() {
                // Made by a macro of that module, or not to be found.
                return BTreeSet::from([Meaning::Item(within)]);
            }
            rest = after;
        }
        meanings
    }

    /// What a name stands for in a module: a child, an item, or what is imported under that name.
    fn look_up(
        &self,
        module: ModuleId,
        name: &str,
        seen: &mut BTreeSet<(ModuleId, String)>,
    ) -> BTreeSet<Meaning> {
        if !seen.insert((module, name.to_owned())) {
            return BTreeSet::new();
        }
        let here = &self.modules[module];
        let mut found = BTreeSet::new();
        found.extend(here.children.get(name).map(|&child| Meaning::Module(child)));
        if here.names.defined.contains(name) {
            found.insert(Meaning::Item(module));
        }
        for import in &here.names.imports {
            if import.name.as_deref() == Some(name) {
                found.extend(self.resolve_once(module, &import.path, seen));
            }
        }
        if found.is_empty() {
            for import in here.names.imports.iter().filter(|import| import.name.is_none()) {
                for meaning in self.resolve_once(module, &import.path, seen) {
                    if let Meaning::Module(from) = meaning {
                        found.extend(self.look_up(from, name, seen));
                    }
                }
            }
        }
        seen.remove(&(module, name.to_owned()));
        found
    }
}
