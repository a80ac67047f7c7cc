//! What one module defines, imports and names in paths. Tests are left out.

use std::collections::BTreeSet;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

/// One name of a `use` declaration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Import {
    /// The name that it has here; `None` for a glob.
    pub(crate) name: Option<String>,
    pub(crate) path: Vec<String>,
    /// Handed on to others: `pub use`, with or without a restriction.
    pub(crate) is_public: bool,
}

/// The names of one module, without those of its child modules.
#[derive(Debug, Default)]
pub(crate) struct Names {
    pub(crate) defined: BTreeSet<String>,
    pub(crate) imports: Vec<Import>,
    /// Paths of two and more segments, outside of `use`.
    pub(crate) paths: BTreeSet<Vec<String>>,
    /// The first segment of every path outside of `use`.
    pub(crate) mentioned: BTreeSet<String>,
}

impl Names {
    pub(crate) fn of(items: &[syn::Item]) -> Self {
        let mut names = Self::default();
        for item in items {
            if let Some(name) = defined_by(item) {
                names.defined.insert(name);
            }
            names.visit_item(item);
        }
        names
    }

    fn add_path(&mut self, path: Vec<String>) {
        if let Some(first) = path.first() {
            self.mentioned.insert(first.clone());
        }
        if path.len() > 1 {
            self.paths.insert(path);
        }
    }

    fn add_imports(&mut self, tree: &syn::UseTree, prefix: &[String], is_public: bool) {
        let with = |last: &syn::Ident| [prefix, &[last.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.add_imports(&path.tree, &with(&path.ident), is_public),
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_imports(tree, prefix, is_public));
            }
            syn::UseTree::Glob(_) => {
                self.imports.push(Import { name: None, path: prefix.to_vec(), is_public })
            }
            syn::UseTree::Name(name) if name.ident == "self" => {
                self.imports.push(Import { name: prefix.last().cloned(), path: prefix.to_vec(), is_public });
            }
            syn::UseTree::Name(name) => {
                let path = with(&name.ident);
                self.imports.push(Import { name: Some(name.ident.to_string()), path, is_public });
            }
            syn::UseTree::Rename(rename) => {
                let path = if rename.ident == "self" { prefix.to_vec() } else { with(&rename.ident) };
                self.imports.push(Import { name: Some(rename.rename.to_string()), path, is_public });
            }
        }
    }

    /// Paths in what a macro is given, which has no grammar: names that `::` joins.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add_path(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' && !path.is_empty() => colons += 1,
                other => {
                    self.add_path(std::mem::take(&mut path));
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add_path(path);
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            // Modules have names of their own.
            syn::Item::Mod(_) => {}
            syn::Item::Use(used) => {
                let is_public = !matches!(used.vis, syn::Visibility::Inherited);
                self.add_imports(&used.tree, &[], is_public);
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !is_for_tests(&function.attrs) {
            visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            self.add_path(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        visit::visit_macro(self, called);
        self.add_tokens(called.tokens.clone());
    }

    // Neither uses anything: `pub(in crate::plan)` and attributes.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}
}

/// Whether an item is compiled for tests only.
pub(crate) fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) => list.path.is_ident("cfg") && demands_test(list.tokens.clone()),
        syn::Meta::NameValue(_) => false,
    })
}

/// `test`, or `all(…)` with it.
fn demands_test(condition: TokenStream) -> bool {
    let mut tokens = condition.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let TokenTree::Ident(name) = token else { continue };
        match tokens.peek() {
            Some(TokenTree::Group(group)) if name == "all" && demands_test(group.stream()) => return true,
            Some(TokenTree::Group(_)) => {}
            _ if name == "test" => return true,
            _ => {}
        }
    }
    false
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::ExternCrate(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::ForeignMod(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Macro(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::TraitAlias(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn defined_by(item: &syn::Item) -> Option<String> {
    let name = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::TraitAlias(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(name.to_string())
}
