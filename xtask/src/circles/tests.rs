//! Small made-up crates, each with one fault or with something that looks like one.

use std::path::{Path, PathBuf};

use super::{Circle, House};

/// Reads a workspace of one crate, `made-up` in the folder `made_up`, with these files below
/// `src/`.
fn house(files: &[(&str, &str)]) -> House {
    let root = tempfile::tempdir().expect("a folder");
    let package = root.path().join("made_up");
    for (path, text) in [("../Cargo.toml", "name = \"made-up\"\n")].iter().chain(files) {
        let path = package.join("src").join(path);
        let folder = path.parent().expect("a file in a folder");
        std::fs::create_dir_all(package.join("src")).expect("a folder");
        std::fs::create_dir_all(folder).expect("a folder");
        std::fs::write(path, text).expect("a file");
    }
    House::read(root.path(), &[PathBuf::from("made_up")])
}

fn circles(files: &[(&str, &str)]) -> Vec<Circle> {
    let house = house(files);
    assert!(house.unread().is_empty(), "{:?}", house.unread());
    house.circles()
}

fn assert_none(files: &[(&str, &str)]) {
    assert_eq!(circles(files), []);
}

/// The one circle of these files, by the names of its files, and its fault.
fn only(files: &[(&str, &str)]) -> (Vec<String>, Option<String>) {
    let [circle] = circles(files).try_into().unwrap_or_else(|found| panic!("{found:?}"));
    let names = circle.files.iter().map(|file| {
        let below = file.strip_prefix("made_up/src").expect("a file of the crate");
        below.display().to_string()
    });
    (names.collect(), circle.fault)
}

const LIB: &str = "mod a; mod b; mod c; mod d;";

#[test]
fn four_files_in_a_circle_are_a_fault_and_its_arrows_are_told() {
    let files = [
        ("lib.rs", LIB),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "use crate::c::{C, other as _}; pub struct B(C);"),
        ("c.rs", "use crate::d; pub fn other() {} pub struct C(d::D);"),
        ("d.rs", "pub struct D(Box<crate::a::A>);"),
    ];
    let (names, fault) = only(&files);
    assert_eq!(names, ["a.rs", "b.rs", "c.rs", "d.rs"]);
    assert_eq!(fault.as_deref(), Some("more than 3 files"));
    let arrows = &circles(&files)[0].arrows;
    assert_eq!(arrows.len(), 4, "{arrows:?}");
    assert_eq!(arrows[1], "made_up/src/b.rs -> made_up/src/c.rs: C, other");
}

#[test]
fn three_files_in_a_circle_are_no_fault() {
    let (names, fault) = only(&[
        ("lib.rs", LIB),
        ("a.rs", "use crate::b::B; pub struct A(B);"),
        ("b.rs", "use crate::c::C; pub struct B(C);"),
        ("c.rs", "use super::a::A; pub struct C(Box<A>);"),
        ("d.rs", "use crate::a::A; pub struct D(A);"),
    ]);
    assert_eq!((names.len(), fault), (3, None));
}

#[test]
fn a_circle_across_folders_is_a_fault() {
    let (names, fault) = only(&[
        ("lib.rs", "mod plan; mod strategy;"),
        ("plan/mod.rs", "mod step; pub use step::Step;"),
        ("plan/step.rs", "use crate::strategy::Strategy; pub struct Step(Strategy);"),
        ("strategy/mod.rs", "use crate::plan::Step; pub enum Strategy { Of(Box<Step>) }"),
    ]);
    // The re-export leads to the file that defines the name.
    assert_eq!(names, ["plan/step.rs", "strategy/mod.rs"]);
    assert_eq!(fault.as_deref(), Some("across folders (made_up/src/plan/, made_up/src/strategy/)"));
}

#[test]
fn a_file_beside_the_folder_of_its_children_belongs_to_that_folder() {
    let with = |a: &str| {
        only(&[
            ("lib.rs", "mod plan; mod mesh;"),
            ("plan.rs", a),
            ("plan/step.rs", ""),
            ("mesh.rs", "pub struct Mesh(crate::plan::Plan);"),
        ])
    };
    let fault = with("mod step; pub struct Plan(Box<crate::mesh::Mesh>);").1;
    assert_eq!(fault.as_deref(), Some("across folders (made_up/src/, made_up/src/plan/)"));
    // Without children it is a file like others.
    assert_eq!(with("pub struct Plan(Box<crate::mesh::Mesh>);").1, None);
}

#[test]
fn a_circle_through_a_name_that_an_ancestor_hands_on_is_found() {
    let (names, _) = only(&[
        ("lib.rs", "mod a; mod b; pub use a::A; pub use b::B as Renamed;"),
        ("a.rs", "pub struct A(crate::Renamed);"),
        ("b.rs", "use super::A; pub struct B(Box<A>);"),
    ]);
    assert_eq!(names, ["a.rs", "b.rs"]);
}

#[test]
fn circles_by_globs_paths_and_macros_are_found() {
    for user in [
        "use crate::b::*; pub fn a() { b() }",
        "pub fn a() { crate::b::b() }",
        "use super::b; pub fn a() { b::b() }",
        "pub fn a() { use crate::b::b; b() }",
        "pub fn a() { assert!(true, \"{}\", crate::b::b()) }",
        "macro_rules! m { () => { $crate::b::b() } }",
        "pub fn a() -> impl Iterator<Item = crate::b::Item> { [].into_iter() }",
        "use made_up::b::b; pub fn a() { b() }",
        // Made by a macro that is not expanded here: an arrow to the file that calls it.
        "use crate::b::Made; pub fn a() {}",
    ] {
        let b = "use crate::a::a; make! { Made } pub struct Item; pub fn b() { a() }";
        let (names, _) = only(&[("lib.rs", "mod a; mod b;"), ("a.rs", user), ("b.rs", b)]);
        assert_eq!(names, ["a.rs", "b.rs"], "{user}");
    }
}

#[test]
fn declarations_and_names_handed_on_are_no_arrows() {
    assert_none(&[
        ("lib.rs", "mod a; mod b; mod prelude; pub struct Shared;"),
        ("prelude.rs", "pub use crate::a::A; pub(crate) use crate::b::*;"),
        // `use`s of a name through a file that only hands it on do not tie to that file.
        ("a.rs", "use crate::Shared; pub struct A(Shared);"),
        ("b.rs", "use crate::prelude::A; pub struct B(A);"),
    ]);
}

#[test]
fn a_module_may_use_its_children_and_they_what_it_defines() {
    assert_none(&[
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod b; mod c; pub struct A(b::B); impl A { fn f(&self) { c::c(self) } }"),
        ("a/b.rs", "pub struct B(Box<super::A>);"),
        ("a/c.rs", "use crate::a::A; pub fn c(_: &A) {}"),
    ]);
    // But what the parent uses of its children may close a circle with somebody else.
    let (names, _) = only(&[
        ("lib.rs", "mod a; mod user;"),
        ("a/mod.rs", "mod b; pub struct A(b::B);"),
        ("a/b.rs", "pub struct B(crate::user::User);"),
        ("user.rs", "pub struct User(Box<crate::a::A>);"),
    ]);
    assert_eq!(names, ["a/mod.rs", "a/b.rs", "user.rs"]);
}

#[test]
fn tests_do_not_count() {
    for tests in [
        "#[cfg(test)] mod tests { use crate::b::B; }",
        "#[cfg(test)] mod tests;",
        "#[cfg(all(test, feature = \"x\"))] mod tests;",
        "#[cfg(test)] use crate::b::B;",
        "pub struct S; impl S { #[cfg(test)] fn f() { crate::b::b() } }",
        "#[cfg(test)] fn f() -> crate::b::B { crate::b::b() }",
    ] {
        assert_none(&[
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", &format!("pub struct A; {tests}")),
            ("a/tests.rs", "use crate::b::B;"),
            ("b.rs", "pub struct B(crate::a::A); pub fn b() {}"),
        ]);
    }
    // A condition that holds outside of tests too is no test.
    for other in ["not(test)", "any(test, unix)"] {
        let a = format!("pub struct A; #[cfg({other})] fn f(_: crate::b::B) {{}}");
        only(&[("lib.rs", "mod a; mod b;"), ("a.rs", &a), ("b.rs", "pub struct B(crate::a::A);")]);
    }
}

#[test]
fn text_is_no_arrow() {
    assert_none(&[
        ("lib.rs", "mod a; mod b;"),
        (
            "a.rs",
            "//! [`crate::b::B`]\n/// `crate::b`\npub struct A; // crate::b::B\nconst S: &str = \"crate::b::B\";",
        ),
        ("b.rs", "pub(in crate::b) struct B(crate::a::A); use std::fmt; use a::A; fn f(_: fmt::Result) {}"),
    ]);
}

#[test]
fn a_program_uses_the_library_beside_it() {
    let house = house(&[
        ("lib.rs", "pub mod a;"),
        ("a.rs", "pub fn a() {}"),
        ("bin/program.rs", "fn main() { made_up::a::a() }"),
        ("../benches/speed/main.rs", "mod ends; fn main() { ends::f() }"),
        ("../benches/speed/ends.rs", "pub fn f() { made_up::a::a() }"),
    ]);
    assert_eq!(house.file_count(), 5);
    let way = house.way(Path::new("made_up/benches"), Path::new("made_up/src/a.rs"));
    assert_eq!(way.as_deref(), Some("made_up/benches/speed/ends.rs -> made_up/src/a.rs"));
    assert_eq!(house.way(Path::new("made_up/src/a.rs"), Path::new("made_up/benches")), None);
}

#[test]
fn a_use_through_others_is_found_with_its_way() {
    let house = house(&[
        ("lib.rs", LIB),
        ("a.rs", "use crate::b::b;"),
        ("b.rs", "pub fn b() { crate::c::c() }"),
        ("c.rs", "pub fn c() {}"),
        ("d.rs", ""),
    ]);
    let way = |from: &str, to: &str| house.way(Path::new(from), Path::new(to));
    let expected = "made_up/src/a.rs -> made_up/src/b.rs -> made_up/src/c.rs";
    assert_eq!(way("made_up/src/a.rs", "made_up/src/c.rs").as_deref(), Some(expected));
    assert_eq!(way("made_up/src/a.rs", "made_up/src/d.rs"), None);
    assert!(house.contains(Path::new("made_up/src/d.rs")) && !house.contains(Path::new("made_up/src/e.rs")));
}

#[test]
fn a_file_that_cannot_be_read_is_a_fault() {
    let house = house(&[("lib.rs", "mod a; mod missing;"), ("a.rs", "fn (")]);
    let [a, missing] = house.unread() else { panic!("{:?}", house.unread()) };
    assert!(a.starts_with("made_up/src/a.rs:1: cannot be parsed"), "{a}");
    assert!(missing.contains("missing") && missing.contains("cannot be read"), "{missing}");
}
