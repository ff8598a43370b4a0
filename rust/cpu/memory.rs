//! Memory that the threads of a step share: zeroed, aligned to cache lines, on huge pages where it is large.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes of a cache line, and of a 512-bit register.
const CACHE_LINE: usize = 64;
/// From this size on, memory begins at a huge page: reading weights goes through far fewer translations.
const HUGE_PAGE: usize = 2 << 20;
/// What the allocator gives without being asked for more. Only up to here does it take zeros from the system untouched,
/// so the memory is asked for with room to align it.
const BASE_ALIGNMENT: usize = 16;

/// The machine has no memory of `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes asked for.
    pub bytes: u128,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "there is no memory of {} bytes", self.bytes)
    }
}

impl std::error::Error for OutOfMemory {}

/// Plain numbers: any bytes are one, zeros too.
///
/// # Safety
/// Only for types for which that is so.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for u32 {}
// SAFETY: numbers.
unsafe impl Plain for u16 {}
// SAFETY: numbers.
unsafe impl Plain for u8 {}

/// Numbers that several threads read and write in one phase of a step, in parts that do not overlap.
pub(crate) struct Shared<T> {
    first: NonNull<T>,
    len: usize,
    /// What was allocated: `first` is the first aligned place in it. None where there are no elements.
    allocation: Option<(NonNull<u8>, Layout)>,
}

// SAFETY: it owns plain numbers; access by several threads is what the unsafe methods are about.
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    /// `len` zeros. Pages that are never touched, huge ones where it is large, take no memory.
    pub(crate) fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        if len == 0 {
            return Ok(Self { first: NonNull::dangling(), len, allocation: None });
        }
        let no_memory = OutOfMemory { bytes: len as u128 * size_of::<T>() as u128 };
        let bytes = len.checked_mul(size_of::<T>()).ok_or(no_memory)?;
        let alignment = if bytes >= HUGE_PAGE { HUGE_PAGE } else { CACHE_LINE };
        let layout = bytes
            .checked_add(alignment)
            .and_then(|padded| Layout::from_size_align(padded, BASE_ALIGNMENT).ok())
            .ok_or(no_memory)?;
        // SAFETY: the layout has a size.
        let allocated = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(no_memory)?;
        let skip = allocated.as_ptr().align_offset(alignment);
        // SAFETY: `skip` is less than the alignment, by which the allocation is larger than its elements.
        let first = unsafe { allocated.add(skip) }.cast::<T>();
        #[cfg(target_os = "linux")]
        if bytes >= HUGE_PAGE {
            // SAFETY: the range is ours; this advises and changes no byte. Where it is refused, small pages serve.
            unsafe { libc::madvise(first.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Self { first, len, allocation: Some((allocated, layout)) })
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All elements.
    pub(crate) fn as_slice(&mut self) -> &mut [T] {
        // SAFETY: they are ours, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr(), self.len) }
    }

    /// The elements of `range`, to be read.
    ///
    /// # Safety
    /// Nobody writes any of them as long as the slice is used.
    ///
    /// # Panics
    /// If the range is not inside.
    pub(crate) unsafe fn read(&self, range: Range<usize>) -> &[T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the allocation, as was just checked; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr().add(range.start), range.len()) }
    }

    /// The elements of `range`, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes any of them as long as the slice is used.
    ///
    /// # Panics
    /// If the range is not inside.
    #[expect(clippy::mut_from_ref, reason = "the caller answers for it that nobody else has these elements")]
    pub(crate) unsafe fn write(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: inside the allocation, as was just checked; the caller answers for the rest.
        unsafe { std::slice::from_raw_parts_mut(self.first.as_ptr().add(range.start), range.len()) }
    }

    /// Writes one element. Its neighbours may be written at the same time.
    ///
    /// # Safety
    /// Nobody else reads or writes this element meanwhile.
    ///
    /// # Panics
    /// If there is no such element.
    pub(crate) unsafe fn set(&self, index: usize, value: T) {
        assert!(index < self.len, "{index} of {}", self.len);
        // SAFETY: inside the allocation, as was just checked; the caller answers for the rest.
        unsafe { self.first.as_ptr().add(index).write(value) };
    }

    /// Writes `values` to every `stride`-th element from `first` on.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements meanwhile; those between them may be.
    ///
    /// # Panics
    /// If one of them is not inside.
    pub(crate) unsafe fn write_every(&self, first: usize, stride: usize, values: &[T]) {
        let Some(last) = values.len().checked_sub(1) else { return };
        assert!(first + last * stride < self.len, "{first} + {last} * {stride} of {}", self.len);
        for (index, &value) in values.iter().enumerate() {
            // SAFETY: not behind the last, which was just checked; the caller answers for the rest.
            unsafe { self.first.as_ptr().add(first + index * stride).write(value) };
        }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if let Some((allocated, layout)) = self.allocation {
            // SAFETY: allocated in `zeroed` with this layout, and given back once.
            unsafe { dealloc(allocated.as_ptr(), layout) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} elements", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeros_that_begin_at_a_cache_line_or_a_huge_page() {
        for (len, alignment) in [(1, CACHE_LINE), (1000, CACHE_LINE), (HUGE_PAGE / 4, HUGE_PAGE), (3 << 20, HUGE_PAGE)]
        {
            let mut memory = Shared::<f32>::zeroed(len).expect("little memory");
            assert_eq!(memory.len(), len);
            assert!(memory.as_slice().as_ptr().addr().is_multiple_of(alignment), "{len}");
            assert!(memory.as_slice().iter().all(|value| value.to_bits() == 0));
        }
        assert_eq!(Shared::<u16>::zeroed(0).expect("none").as_slice(), [0_u16; 0]);
    }

    #[test]
    fn too_much_memory_is_refused_with_its_size() {
        assert_eq!(Shared::<u32>::zeroed(usize::MAX).err(), Some(OutOfMemory { bytes: 4 * usize::MAX as u128 }));
        assert_eq!(Shared::<u8>::zeroed(isize::MAX as usize).err(), Some(OutOfMemory { bytes: isize::MAX as u128 }));
    }

    #[test]
    fn strided_writes_touch_their_elements_alone() {
        let mut memory = Shared::<u16>::zeroed(10).expect("little memory");
        // SAFETY: nobody else has it.
        unsafe { memory.write_every(1, 4, &[7, 8, 9]) };
        assert_eq!(memory.as_slice(), [0, 7, 0, 0, 0, 8, 0, 0, 0, 9]);
    }

    #[test]
    #[should_panic(expected = "2 + 2 * 4 of 10")]
    fn a_strided_write_past_the_end_is_stopped() {
        let memory = Shared::<u16>::zeroed(10).expect("little memory");
        // SAFETY: nobody else has it.
        unsafe { memory.write_every(2, 4, &[7, 8, 9]) };
    }

    #[test]
    #[should_panic(expected = "8..11 of 10")]
    fn a_read_past_the_end_is_stopped() {
        let memory = Shared::<u16>::zeroed(10).expect("little memory");
        // SAFETY: nobody else has it.
        let _ = unsafe { memory.read(8..11) };
    }
}
