//! How numbers of postings become bytes: variable bytes, and blocks of 128 numbers of as many bits as the largest needs.
//!
//! A block lies in four lanes: number i is in lane i % 4, and every lane fills words of 32 bits from the low end, so that four
//! numbers are cut out by each vector instruction (the layout of Lemire and Boytsov 2015, "Decoding billions of integers per second
//! through vectorization"; no code of theirs).

/// Numbers of a block.
pub const BLOCK: usize = 128;

/// A block of numbers; word `l` of row `i` is number `4 i + l`.
pub type Block = [[u32; 4]; 32];

/// Bytes of a block of numbers of this many bits.
pub const fn packed_bytes(bits: u32) -> usize {
    bits as usize * 16
}

/// Bits that the largest of these numbers needs.
pub fn bits(block: &Block) -> u32 {
    32 - block.as_flattened().iter().fold(0, |all, n| all | n).leading_zeros()
}

/// Appends a block whose numbers all have at most `bits` bits.
pub fn pack(block: &Block, bits: u32, out: &mut Vec<u8>) {
    let mut words = [[0u32; 4]; 32];
    for (i, row) in block.iter().enumerate() {
        let at = i * bits as usize;
        let (word, shift) = (at / 32, at % 32);
        for (lane, &n) in row.iter().enumerate() {
            if bits > 0 {
                words[word][lane] |= n << shift;
                if shift + bits as usize > 32 {
                    words[word + 1][lane] |= n >> (32 - shift);
                }
            }
        }
    }
    out.extend(words.as_flattened()[..bits as usize * 4].iter().flat_map(|w| w.to_le_bytes()));
}

/// Reads the block at the start of `bytes`; `None` if there are too few, or the number of bits is none.
#[inline]
pub fn unpack(bytes: &[u8], bits: u32, out: &mut Block) -> Option<()> {
    macro_rules! by_bits {
        ($($n:literal)*) => {
            match bits {
                0 => *out = [[0; 4]; 32],
                $($n => unpack_bits::<$n>(bytes.first_chunk::<{ $n * 16 }>()?.as_chunks::<16>().0, out),)*
                _ => return None,
            }
        };
    }
    by_bits!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);
    Some(())
}

/// `rows` has `BITS` rows.
#[inline]
fn unpack_bits<const BITS: usize>(rows: &[[u8; 16]], out: &mut Block) {
    let row = |i: usize| -> [u32; 4] {
        let (words, _) = rows[i].as_chunks::<4>();
        std::array::from_fn(|lane| u32::from_le_bytes(words[lane]))
    };
    let mask = u32::MAX >> (32 - BITS);
    // All of this is known when the code is made: the loop becomes a row of shifts.
    for (i, out) in out.iter_mut().enumerate() {
        let at = i * BITS;
        let (word, shift) = (at / 32, at % 32);
        let low = row(word);
        // Of a row that a number does not reach nothing is read.
        let high = if shift + BITS > 32 { row(word + 1) } else { [0; 4] };
        let up = if shift + BITS > 32 { 32 - shift } else { 0 };
        for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(high)) {
            *out = (low >> shift | high << up) & mask;
        }
    }
}

/// Appends a number, seven bits a byte, low ones first; the last byte's high bit is not set.
pub fn put(mut n: u64, out: &mut Vec<u8>) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Takes a number from the front; `None` if it does not end, or is larger than 64 bits.
#[inline]
pub fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        n |= part << shift;
        if byte < 0x80 {
            return Some(n);
        }
    }
    None
}

/// As [`take`], of a number of 32 bits.
#[inline]
pub fn take_u32(bytes: &mut &[u8]) -> Option<u32> {
    take(bytes).and_then(|n| u32::try_from(n).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn numbers_come_back(numbers in prop::collection::vec(any::<u64>(), 0..50), shift in 0u32..64) {
            let numbers: Vec<u64> = numbers.iter().map(|n| n >> shift).collect();
            let mut bytes = Vec::new();
            numbers.iter().for_each(|&n| put(n, &mut bytes));
            let mut rest = &bytes[..];
            let found: Option<Vec<u64>> = numbers.iter().map(|_| take(&mut rest)).collect();
            prop_assert_eq!(found, Some(numbers));
            prop_assert!(rest.is_empty());
        }

        #[test]
        fn blocks_come_back(seed in any::<u64>(), most in 0u32..=32) {
            let number = |k: u64| (tercio_data::draw::keyed(&[seed, k]) as u32).checked_shr(32 - most).unwrap_or(0);
            let block: Block = std::array::from_fn(|i| std::array::from_fn(|l| number(4 * i as u64 + l as u64)));
            let mut bytes = Vec::new();
            pack(&block, bits(&block), &mut bytes);
            prop_assert_eq!(bytes.len(), packed_bytes(bits(&block)));
            let mut found = [[1; 4]; 32];
            prop_assert_eq!(unpack(&bytes, bits(&block), &mut found), Some(()));
            prop_assert_eq!(found, block);
            if !bytes.is_empty() {
                prop_assert_eq!(unpack(&bytes[1..], bits(&block), &mut found), None);
            }
        }
    }

    #[test]
    fn what_is_no_number_is_refused() {
        let mut other = [[0; 4]; 32];
        assert!(unpack(&[0; 1024], 33, &mut other).is_none());
        for bytes in
            [&[][..], &[0x80], &[0xff; 11], &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02]]
        {
            assert_eq!(take(&mut &bytes[..]), None, "{bytes:?}");
        }
        assert_eq!(take_u32(&mut &[0xff, 0xff, 0xff, 0xff, 0x1f][..]), None);
    }
}
