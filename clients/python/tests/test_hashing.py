"""Block hashes, against vectors that other routers of this kind publish or that were taken from them."""

import unittest

from kvrouted import InvalidRequest, Scheme, Window
from kvrouted.hashing import block_count, local_hashes, sequence_hashes, token_bytes

TOKENS = range(1, 41)
BY_16 = Scheme(16)
A = [0xEA06FC71A5EE6E88, 0x1FBF39BD106BE0B5]


class Vectors(unittest.TestCase):
    def check(self, found, local, last_sequence):
        self.assertEqual([hex(hash_of) for hash_of in found], [hex(hash_of) for hash_of in local])
        self.assertEqual(hex(sequence_hashes(found)[-1]), hex(last_sequence))

    def test_tokens_that_fill_no_block_are_left_out(self):
        self.check(local_hashes(TOKENS, BY_16), A, 0xAD01835A37DD294C)
        large = local_hashes(range(1, 131), Scheme(64))
        self.check(large, [0xF617BF3B93A1D900, 0xEB9DEC89F9D951F4], 0x0E934255BC70C31F)

    def test_adapter_and_salt_enter_the_seed_and_empty_names_do_not(self):
        lora = local_hashes(TOKENS, BY_16, lora="my-lora")
        self.check(lora, [0x3990F1B14309D7E6, 0x27C809C22DA91B94], 0x6CF1D86294264B7A)
        salted = local_hashes(TOKENS, BY_16, salt="tenant-a")
        self.check(salted, [0x71742DFED90682A9, 0xB7DB648AA3DFB040], 0x10A55ACC122317D5)
        both = local_hashes(TOKENS, BY_16, lora="my-lora", salt="tenant-a")
        self.check(both, [0x12ED440CCCC38CF3, 0x9DB0A52CBD130133], 0x5A006D5753BFDA88)
        self.assertEqual(local_hashes(TOKENS, BY_16, lora="", salt=""), A)

    def test_objects_enter_the_blocks_they_touch_in_any_order(self):
        expected = [A[0], 0x17F610FA8AE6B163]
        for media in ([(1, 0xDEADBEEF), (1, 7)], [(1, 7), (1, 0xDEADBEEF), (9, 1)]):
            self.check(local_hashes(TOKENS, BY_16, media=media), expected, 0xF5C92129EDCC7EB7)

    def test_a_bigram_block_covers_the_token_after_its_last(self):
        bigram = Scheme(16, Window.BIGRAM)
        self.check(local_hashes(TOKENS, bigram), [0x5DB5A9903451D2D0, 0xC98D53F2AE88291E], 0x7F652463AFFB3FEE)
        self.assertEqual([block_count(n, bigram) for n in (0, 1, 16, 17, 33)], [0, 0, 0, 1, 2])

    def test_extreme_tokens_and_equal_blocks(self):
        zeros = local_hashes([0] * 64, BY_16)
        self.check(zeros, [0x4CA6490661395090] * 4, 0xBB3BA69F036C7F48)
        self.assertEqual(sequence_hashes(zeros)[1:3], [0x2B0FA0857B243841, 0xA6C0F42DFCB6FC20])
        self.check(local_hashes([2**32 - 1] * 32, Scheme(32)), [0x985AF2837B3505FF], 0x985AF2837B3505FF)
        spread = [(i * 2654435761 % 2**32) % 128256 for i in range(64)]
        self.check(local_hashes(spread, Scheme(64)), [0xD3EB2937FC7FF84B], 0xD3EB2937FC7FF84B)

    def test_nothing_makes_no_blocks(self):
        self.assertEqual(local_hashes([], BY_16), [])
        self.assertEqual(local_hashes(TOKENS, Scheme(0)), [])
        self.assertEqual(sequence_hashes([]), [])


class Tokens(unittest.TestCase):
    def test_bytes_and_integers_are_the_same_prompt(self):
        self.assertEqual(token_bytes([1, 2**32 - 1]), b"\x01\0\0\0\xff\xff\xff\xff")
        self.assertEqual(local_hashes(token_bytes(TOKENS), BY_16), A)

    def test_an_invalid_token_is_refused(self):
        for tokens in ([-1], [2**32], ["a"], b"\0\0\0"):
            with self.assertRaises(InvalidRequest):
                token_bytes(tokens)
