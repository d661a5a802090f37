//! Compiles kernels with NVRTC, which needs no CUDA toolkit, headers or driver, and caches the binaries on disk.
#![expect(unsafe_code, reason = "NVRTC is a C library that is opened at run time")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::ptr;

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys;
use sha2::{Digest, Sha256};

use super::kernels::{KernelDtype, Program};
use super::libraries::{self, NVRTC, NvrtcFunctions};
use crate::files;

/// Why kernels could not be compiled.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The library cannot be opened.
    #[error(
        "NVRTC, NVIDIA's compiler of kernels, cannot be opened ({why}); expected {NVRTC} in nvidia/cu13/lib beside torch/, where scripts/setup \
         and PyTorch's own wheels for CUDA 13 put it, or in a folder that the loader searches"
    )]
    Missing {
        /// The loader's message.
        why: String,
    },
    /// A kernel file that does not compile.
    #[error("{file} for {arch}: NVRTC says {code}\n{log}")]
    Refused {
        file: &'static str,
        /// Target architecture.
        arch: String,
        /// NVRTC's error code.
        code: String,
        /// The compiler's output.
        log: String,
    },
    /// The cache folder cannot be written.
    #[error("cannot keep compiled kernels in {}: {source}; set MEDUSA_CACHE to a folder that can be written", path.display())]
    Cache { path: PathBuf, source: io::Error },
}

/// Version of the cache files; part of the hash in their names.
const FORMAT: &str = "medusa kernels 1";
const OPTIONS: [&str; 2] = ["--std=c++17", "--ptxas-options=-v"];

/// NVRTC and the cache of compiled kernels.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: &'static NvrtcFunctions,
    version: (i32, i32),
    folder: Option<PathBuf>,
}

/// A compiled kernel file.
#[derive(Debug, PartialEq, Eq)]
pub struct Compiled {
    /// Machine code that the driver loads.
    pub cubin: Vec<u8>,
    /// The compiler's output, which lists the resources that each kernel uses.
    pub log: String,
}

/// Resources of a multiprocessor that a kernel uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resources {
    pub kernel: String,
    /// Per thread.
    pub registers: u32,
    /// Static shared memory per block; the launch may add dynamic shared memory.
    pub shared_bytes: u32,
    /// Per thread: registers spilled to memory.
    pub spilled_bytes: u32,
}

impl Compiler {
    /// Opens the library from beside libtorch, or else where the loader finds it. Compiled kernels are cached in `folder`, if
    /// given.
    ///
    /// # Errors
    /// [`CompileError::Missing`].
    pub fn open(folder: Option<PathBuf>) -> Result<Self, CompileError> {
        let nvrtc = libraries::nvrtc().map_err(|why| CompileError::Missing { why: why.clone() })?;
        let mut version = (0, 0);
        // SAFETY: writes two integers.
        let _ = unsafe { (nvrtc.version)(&raw mut version.0, &raw mut version.1) };
        Ok(Self { nvrtc, version, folder })
    }

    /// The library's version.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a file's kernels for `arch` (`sm_90a`, for example), or reads them from the cache.
    ///
    /// # Errors
    /// [`CompileError`] names the file, or the folder.
    pub fn compile(
        &self,
        program: Program,
        element: KernelDtype,
        head_size: i64,
        arch: &str,
    ) -> Result<Compiled, CompileError> {
        let source = program.source(element, head_size);
        let Some(folder) = &self.folder else {
            return self.compiled(program.file(), &source, arch);
        };
        let path = folder.join(self.name(program, &source, arch));
        if let Some(kept) = read(&path) {
            return Ok(kept);
        }
        let compiled = self.compiled(program.file(), &source, arch)?;
        write(&path, &compiled).map_err(|source| CompileError::Cache { path, source })?;
        Ok(compiled)
    }

    fn compiled(&self, file: &'static str, source: &str, arch: &str) -> Result<Compiled, CompileError> {
        let text = |text: &str| CString::new(text).expect("sources and options have no zero bytes");
        let refused = |code: NvrtcError, log: String| CompileError::Refused {
            file,
            arch: arch.to_owned(),
            code: format!("{:?}", code.0),
            log,
        };
        let source =
            Source::new(self.nvrtc, [text(source), text(file)]).map_err(|code| refused(code, String::new()))?;
        let for_arch = format!("--gpu-architecture={arch}");
        let options: Vec<CString> = [&*for_arch].into_iter().chain(OPTIONS).map(text).collect();
        let compiled = source.compile(&options);
        let log = source.log();
        let cubin = compiled.and_then(|()| source.cubin()).map_err(|code| refused(code, log.clone()))?;
        Ok(Compiled { cubin, log })
    }

    /// The cache file's name: a hash of everything that the compiled code depends on.
    fn name(&self, program: Program, source: &str, arch: &str) -> String {
        let (major, minor) = self.version;
        let facts = format!("{FORMAT}\nnvrtc {major}.{minor}\n{arch}\n{OPTIONS:?}\n{source}");
        let key = files::hex(&Sha256::digest(facts));
        format!("{}-{arch}-{}.kernels", program.file().trim_end_matches(".cu"), &key[..32])
    }
}

/// A program that NVRTC compiles, destroyed when dropped.
struct Source {
    nvrtc: &'static NvrtcFunctions,
    handle: sys::nvrtcProgram,
    /// The text and the file's name, to which NVRTC may refer.
    texts: [CString; 2],
}

impl Drop for Source {
    fn drop(&mut self) {
        // SAFETY: null, which is refused, or made once, by `new`, and not used any more.
        let _ = unsafe { (self.nvrtc.destroy)(&raw mut self.handle) };
    }
}

impl Source {
    fn new(nvrtc: &'static NvrtcFunctions, texts: [CString; 2]) -> Result<Self, NvrtcError> {
        let mut new = Self { nvrtc, handle: ptr::null_mut(), texts };
        let ([text, name], none) = (new.texts.each_ref().map(|text| text.as_ptr()), ptr::null());
        // SAFETY: both strings live as long as the program; there are no headers.
        unsafe { (nvrtc.create)(&raw mut new.handle, text, name, 0, none, none) }.result()?;
        Ok(new)
    }

    fn compile(&self, options: &[CString]) -> Result<(), NvrtcError> {
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program exists, and the options live during the call.
        unsafe { (self.nvrtc.compile)(self.handle, options.len() as c_int, options.as_ptr()) }.result()
    }

    /// The compiler's log.
    fn log(&self) -> String {
        // SAFETY: both functions are given this program, and the second writes as many bytes as the first says.
        let log = unsafe { self.bytes(self.nvrtc.log_size, self.nvrtc.log) }.unwrap_or_default();
        CStr::from_bytes_until_nul(&log).map_or_else(|_| String::new(), |log| log.to_string_lossy().into_owned())
    }

    /// The compiled machine code.
    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        // SAFETY: as in `log`.
        unsafe { self.bytes(self.nvrtc.cubin_size, self.nvrtc.cubin) }
    }

    /// # Safety
    /// `get` writes as many bytes as `size` says.
    unsafe fn bytes(
        &self,
        size: unsafe extern "C" fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult,
        get: unsafe extern "C" fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut count = 0;
        // SAFETY: by contract; writes one integer.
        unsafe { size(self.handle, &raw mut count) }.result()?;
        let mut bytes = vec![0u8; count];
        // SAFETY: by contract; the buffer has this size.
        unsafe { get(self.handle, bytes.as_mut_ptr().cast()) }.result()?;
        Ok(bytes)
    }
}

/// Reads a cache file; `None` if it is missing or damaged.
fn read(path: &Path) -> Option<Compiled> {
    let bytes = fs::read(path).ok()?;
    let (sum, rest) = bytes.split_at_checked(32)?;
    let (log_bytes, rest) = (Sha256::digest(rest)[..] == *sum).then_some(rest)?.split_at_checked(8)?;
    let log_bytes = usize::try_from(u64::from_le_bytes(log_bytes.try_into().ok()?)).ok()?;
    let (log, cubin) = rest.split_at_checked(log_bytes)?;
    Some(Compiled { cubin: cubin.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

/// Writes a cache file: SHA-256 of the rest, length of the log, log, machine code.
fn write(path: &Path, compiled: &Compiled) -> io::Result<()> {
    let length = (compiled.log.len() as u64).to_le_bytes();
    let rest = [&length[..], compiled.log.as_bytes(), &compiled.cubin].concat();
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    files::write_atomic(path, |out| {
        out.write_all(&Sha256::digest(&rest))?;
        out.write_all(&rest)
    })
}

impl Compiled {
    /// Registers, shared memory and spills of each kernel, read from the compiler's log.
    pub fn resources(&self) -> Vec<Resources> {
        let mut all: Vec<Resources> = vec![];
        for line in self.log.lines() {
            if let Some(name) = line.split("Compiling entry function '").nth(1) {
                let kernel = name.split('\'').next().unwrap_or_default().to_owned();
                all.push(Resources { kernel, registers: 0, shared_bytes: 0, spilled_bytes: 0 });
            }
            let Some(last) = all.last_mut() else { continue };
            last.spilled_bytes += before(line, " bytes spill stores").unwrap_or(0);
            last.registers = before(line, " registers").unwrap_or(last.registers);
            last.shared_bytes = before(line, " bytes smem").unwrap_or(last.shared_bytes);
        }
        all
    }
}

/// The number in front of `words`.
fn before(line: &str, words: &str) -> Option<u32> {
    line.split_once(words)?.0.rsplit([' ', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_what_each_kernel_takes() {
        let log = "ptxas info    : 0 bytes gmem\nptxas info    : Compiling entry function 'walk' for 'sm_90a'\n\
                   ptxas info    : Function properties for walk\n    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 26 registers, used 1 barriers, 8 bytes cumulative stack size, 1536 bytes smem\n\
                   ptxas info    : Compiling entry function 'best' for 'sm_90a'\n    0 bytes stack frame, 0 bytes spill stores\n\
                   ptxas info    : Used 9 registers, used 0 barriers\n";
        let compiled = Compiled { cubin: vec![], log: log.to_owned() };
        let takes = |kernel: &str, registers, shared_bytes, spilled_bytes| Resources {
            kernel: kernel.to_owned(),
            registers,
            shared_bytes,
            spilled_bytes,
        };
        assert_eq!(compiled.resources(), [takes("walk", 26, 1536, 4), takes("best", 9, 0, 0)]);
    }

    #[test]
    fn what_was_kept_is_read_and_what_is_damaged_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("deep/rows.kernels");
        let compiled = Compiled { cubin: vec![7, 0, 9], log: "words".to_owned() };
        write(&path, &compiled).expect("written");
        assert_eq!(read(&path), Some(compiled));
        let mut bytes = fs::read(&path).expect("there");
        *bytes.last_mut().expect("bytes") ^= 1;
        files::write_atomic(&path, |out| out.write_all(&bytes)).expect("written");
        assert_eq!(read(&path), None);
        assert_eq!(read(&folder.path().join("absent")), None);
    }
}
