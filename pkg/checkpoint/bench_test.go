package checkpoint

import "testing"

func BenchmarkRecord(b *testing.B) {
	for name, r := range map[string]Record{"one-GPU": newRecord(gpu0), "two-GPUs": newRecord(gpu0, gpu1)} {
		raw, err := recordFormat.Encode(r)
		if err != nil {
			b.Fatal(err)
		}
		b.Run("encode/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := recordFormat.Encode(r); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("decode/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var read Record
				if err := recordFormat.Decode("a file", raw, &read); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
