//! Loading NCCL.
#![expect(unsafe_code, reason = "NCCL is a C library")]

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;

use kyklos::machine::can_load_drivers;
use libloading::Library;

use super::error::NcclError;
use crate::driver::Unavailable;

/// The wheels have the first name only. The second is that of a development package.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The first version with communicators that do not block during their creation and can be split.
const OLDEST: NcclVersion = NcclVersion { major: 2, minor: 18, patch: 0 };

/// Functions that every NCCL since [`OLDEST`] has, apart from those in the fields of [`Nccl`] and
/// of [`Functions`].
const REQUIRED: [&str; 2] = ["ncclCommCount", "ncclCommUserRank"];

/// Functions of newer versions. NCCL is used without them.
const OPTIONAL: [&str; 11] = [
    "ncclMemAlloc",
    "ncclMemFree",
    "ncclCommRegister",
    "ncclCommInitRankScalable",
    "ncclCommShrink",
    "ncclCommWindowRegister",
    "ncclAlltoAll",
    "ncclCommRevoke",
    "ncclPutSignal",
    "ncclWaitSignal",
    "ncclCommGrow",
];

/// `ncclResult_t`. An integer, because a newer library may return codes that this crate does not
/// know.
pub(super) type Code = c_int;
type GetVersion = unsafe extern "C" fn(*mut c_int) -> Code;
type GetErrorString = unsafe extern "C" fn(Code) -> *const c_char;
type GetLastError = unsafe extern "C" fn(*const c_void) -> *const c_char;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> Code;

/// `ncclComm_t`.
pub(super) type RawCommunicator = *mut c_void;
/// `cudaStream_t`, which is a `CUstream`.
type RawStream = *mut c_void;

/// The functions of communicators, as NCCL declares them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Functions {
    pub(super) init:
        unsafe extern "C" fn(*mut RawCommunicator, c_int, UniqueId, c_int, *const Config) -> Code,
    pub(super) async_error: unsafe extern "C" fn(RawCommunicator, *mut c_int) -> Code,
    pub(super) finalize: unsafe extern "C" fn(RawCommunicator) -> Code,
    pub(super) destroy: unsafe extern "C" fn(RawCommunicator) -> Code,
    pub(super) abort: unsafe extern "C" fn(RawCommunicator) -> Code,
    pub(super) group_start: unsafe extern "C" fn() -> Code,
    pub(super) group_end: unsafe extern "C" fn() -> Code,
    /// Memory, elements, `ncclDataType_t`, peer, communicator, stream.
    pub(super) send:
        unsafe extern "C" fn(*const c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> Code,
    pub(super) recv:
        unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, RawCommunicator, RawStream) -> Code,
}

/// `ncclConfig_t` as of NCCL 2.18. Later versions have more fields at its end; they read as many as
/// `size` says.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Config {
    pub(super) size: usize,
    pub(super) magic: c_uint,
    /// As `ncclGetVersion` counts.
    pub(super) version: c_uint,
    pub(super) blocking: c_int,
    pub(super) cga_cluster_size: c_int,
    pub(super) min_ctas: c_int,
    pub(super) max_ctas: c_int,
    pub(super) net_name: *const c_char,
    pub(super) split_share: c_int,
}

/// A version of NCCL. `Display` writes it as `2.28.9`.
///
/// ```
/// if let Ok(nccl) = kyklos_cuda::Nccl::load() {
///     assert!((nccl.version().major, nccl.version().minor) >= (2, 18));
/// }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NcclVersion {
    /// 2 in 2.28.9.
    pub major: u32,
    /// 28 in 2.28.9.
    pub minor: u32,
    /// 9 in 2.28.9.
    pub patch: u32,
}

impl NcclVersion {
    /// From the number that `ncclGetVersion` gives: 10000 · major + 100 · minor + patch since 2.9,
    /// before that 1000 · major + 100 · minor + patch.
    fn from_number(number: u32) -> Self {
        let unit = if number < 10_000 { 1000 } else { 10_000 };
        Self { major: number / unit, minor: number % unit / 100, patch: number % 100 }
    }
}

impl fmt::Display for NcclVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The name of a communicator that is about to be created: 128 bytes, which contain an address of
/// the rank that made them.
///
/// Whoever knows them can join the communicator, so `Debug` does not show them.
///
/// ```
/// if let Ok(nccl) = kyklos_cuda::Nccl::load()
///     && let Ok(id) = nccl.unique_id()
/// {
///     assert_eq!(format!("{id:?}"), "UniqueId(128 bytes)");
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// The bytes, to be sent to the other ranks over an authenticated connection.
    #[must_use]
    pub fn bytes(&self) -> &[u8; 128] {
        &self.0
    }

    /// The name that another rank has made.
    pub(super) fn from_bytes(bytes: [u8; 128]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(128 bytes)")
    }
}

/// NCCL, loaded. It is never unloaded, because it may have threads of its own.
///
/// ```
/// match kyklos_cuda::Nccl::load() {
///     Ok(nccl) => println!("NCCL {}, without {:?}", nccl.version(), nccl.missing()),
///     Err(unavailable) => println!("{unavailable}"),
/// }
/// ```
#[derive(Debug)]
pub struct Nccl {
    version: NcclVersion,
    missing: Vec<&'static str>,
    get_error_string: GetErrorString,
    get_last_error: GetLastError,
    get_unique_id: GetUniqueId,
    pub(super) functions: Functions,
    /// Keeps the functions above in memory.
    _library: Library,
}

impl Nccl {
    /// Loads NCCL at the first call. The linker's search path decides which library that is.
    ///
    /// # Errors
    /// There is no library, it is older than 2.18, or it lacks a function. Does not panic.
    pub fn load() -> Result<&'static Self, Unavailable> {
        static LOADED: OnceLock<Result<Nccl, Unavailable>> = OnceLock::new();
        LOADED.get_or_init(|| Self::open(&NAMES)).as_ref().map_err(Clone::clone)
    }

    /// The version of the library.
    #[must_use]
    pub fn version(&self) -> NcclVersion {
        self.version
    }

    /// The file from which the library was loaded, where the system tells.
    #[must_use]
    pub fn path(&self) -> Option<String> {
        file_of(self.functions.send as usize as u64)
    }

    /// The optional functions that this library lacks, as it is older than they are.
    #[must_use]
    pub fn missing(&self) -> &[&'static str] {
        &self.missing
    }

    /// The name of a new communicator. NCCL opens a socket for it in this process.
    ///
    /// # Errors
    /// NCCL's code and text, for example if the machine has no network interface.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: `open` found the function, and NCCL declares it with this type. It writes 128 bytes to
        // `id`, a local with the layout of `ncclUniqueId`.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id)
    }

    fn open(names: &[&str]) -> Result<Self, Unavailable> {
        let library = find(names)?;
        let get_version: GetVersion = function(&library, "ncclGetVersion")?;
        let mut number: c_int = 0;
        // SAFETY: NCCL declares the function with this type. It writes one int to `number`, a local, and
        // needs no device.
        let code = unsafe { get_version(&raw mut number) };
        if code != 0 {
            return Err(unusable(format!("ncclGetVersion failed with code {code}"), "install NCCL again"));
        }
        let version = NcclVersion::from_number(number.unsigned_abs());
        if version < OLDEST {
            let why = format!("its version is {version}, the oldest that works is {OLDEST}");
            return Err(unusable(why, "install a newer NCCL"));
        }
        for name in REQUIRED {
            function::<*const c_void>(&library, name)?;
        }
        let lacks = |name: &&str| function::<*const c_void>(&library, name).is_err();
        Ok(Self {
            version,
            missing: OPTIONAL.into_iter().filter(lacks).collect(),
            get_error_string: function(&library, "ncclGetErrorString")?,
            get_last_error: function(&library, "ncclGetLastError")?,
            get_unique_id: function(&library, "ncclGetUniqueId")?,
            functions: Functions {
                init: function(&library, "ncclCommInitRankConfig")?,
                async_error: function(&library, "ncclCommGetAsyncError")?,
                finalize: function(&library, "ncclCommFinalize")?,
                destroy: function(&library, "ncclCommDestroy")?,
                abort: function(&library, "ncclCommAbort")?,
                group_start: function(&library, "ncclGroupStart")?,
                group_end: function(&library, "ncclGroupEnd")?,
                send: function(&library, "ncclSend")?,
                recv: function(&library, "ncclRecv")?,
            },
            _library: library,
        })
    }

    /// `Ok` for `ncclSuccess`, else NCCL's code and texts.
    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: `open` found both functions, and NCCL declares them with these types. The first accepts
        // any code. The second accepts a null pointer instead of a communicator. Neither needs a
        // device.
        let texts = unsafe { [(self.get_error_string)(code), (self.get_last_error)(ptr::null())] };
        let [text, detail] = texts.map(|text| {
            // SAFETY: a pointer that is not null points to a text of NCCL, which ends with a zero byte. It is
            // copied at once.
            let copy = || unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned();
            if text.is_null() { String::new() } else { copy() }
        });
        Err(NcclError { call, code, text, detail })
    }
}

/// The file that is mapped at an address of this process, on Linux.
fn file_of(address: u64) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (first, end) = range.split_once('-')?;
        (number(first)? <= address && address < number(end)?).then_some(())?;
        rest.find('/').map(|at| rest[at..].to_owned())
    })
}

fn find(names: &[&str]) -> Result<Library, Unavailable> {
    if !can_load_drivers() {
        let why = "this program is static (musl), and a static program loads no library".to_owned();
        return Err(unusable(why, "use a build for glibc"));
    }
    let mut reasons = Vec::new();
    for name in names {
        // SAFETY: this loads a shared library and runs its initialisers. Libraries of these names are NCCL,
        // whose initialisers are meant to be run by any process.
        match unsafe { Library::new(*name) } {
            Ok(library) => return Ok(library),
            // The source is the linker's text, which names the library and what is wrong with it.
            Err(error) => reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
        }
    }
    Err(unusable(reasons.join("; "), "install NCCL 2.18 or newer"))
}

/// The function `name` of `library`. `F` is the type with which NCCL declares it, or a pointer that
/// is not called.
fn function<F: Copy>(library: &Library, name: &str) -> Result<F, Unavailable> {
    // SAFETY: the symbol is only looked up. Callers of the function say why its type is right.
    // `library` outlives the copy: it is kept in `Nccl`.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    found
        .map(|symbol| *symbol)
        .map_err(|_| unusable(format!("the library has no function {name}"), "install NCCL 2.18 or newer"))
}

fn unusable(why: String, remedy: &'static str) -> Unavailable {
    Unavailable { why: format!("NCCL cannot be used: {why}"), remedy: remedy.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_versions_are_read_as_nccl_writes_them() {
        let told = [(22_809, "2.28.9"), (21_800, "2.18.0"), (23_203, "2.32.3"), (2_708, "2.7.8")];
        for (number, text) in told {
            assert_eq!(NcclVersion::from_number(number).to_string(), text);
        }
        assert!(NcclVersion::from_number(2_708) < OLDEST);
        assert!(NcclVersion::from_number(21_705) < OLDEST);
        assert!(NcclVersion::from_number(21_800) >= OLDEST);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_file_of_a_function_is_the_program_that_has_it() {
        let own = std::env::current_exe().unwrap();
        assert_eq!(file_of(file_of as *const () as usize as u64).as_deref(), own.to_str());
        assert_eq!(file_of(0), None);
    }

    /// `tests/compilers/nccl_abi.cpp` holds NCCL's header to the same numbers.
    #[test]
    fn a_configuration_is_laid_out_as_nccl_lays_it_out() {
        use std::mem::offset_of;
        assert_eq!(size_of::<UniqueId>(), 128);
        assert_eq!(size_of::<Config>(), 48);
        let head = [offset_of!(Config, size), offset_of!(Config, magic), offset_of!(Config, version)];
        let counts = [
            offset_of!(Config, blocking),
            offset_of!(Config, cga_cluster_size),
            offset_of!(Config, min_ctas),
            offset_of!(Config, max_ctas),
        ];
        assert_eq!((head, counts), ([0, 8, 12], [16, 20, 24, 28]));
        assert_eq!([offset_of!(Config, net_name), offset_of!(Config, split_share)], [32, 40]);
    }

    #[test]
    fn a_library_that_is_missing_is_an_error_with_its_name() {
        let error = Nccl::open(&["libno-such-nccl.so.2"]).unwrap_err().to_string();
        assert!(error.contains("libno-such-nccl.so.2") && error.contains("install NCCL"), "{error}");
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn a_library_without_the_functions_is_an_error_with_the_first_that_it_lacks() {
        let error = Nccl::open(&["libm.so.6"]).unwrap_err().to_string();
        assert!(error.contains("no function ncclGetVersion"), "{error}");
    }

    #[test]
    #[ignore = "needs NVIDIA's libnccl.so.2 on the linker's search path"]
    fn nvidias_library_has_the_functions_and_reports_errors_with_its_texts() {
        let nccl = Nccl::load().unwrap();
        assert_eq!(nccl.version().major, 2);
        // 2.28 is the first version with ncclAlltoAll, 2.29 the first with ncclPutSignal.
        let minor = nccl.version().minor;
        assert_eq!(nccl.missing().contains(&"ncclAlltoAll"), minor < 28, "{nccl:?}");
        assert_eq!(nccl.missing().contains(&"ncclPutSignal"), minor < 29, "{nccl:?}");
        let [one, other] = [nccl.unique_id().unwrap(), nccl.unique_id().unwrap()];
        assert!(one != other);
        let error = nccl.check("ncclSend", 4).unwrap_err();
        assert_eq!((error.call, error.code), ("ncclSend", 4));
        assert!(error.text.starts_with("invalid argument"), "{error}");
    }
}
