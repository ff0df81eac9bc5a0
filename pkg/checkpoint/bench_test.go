package checkpoint

import (
	"testing"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/durabletest"
)

func BenchmarkRecord(b *testing.B) {
	for name, r := range map[string]Record{"one-GPU": newRecord(gpu0), "two-GPUs": newRecord(gpu0, gpu1)} {
		s, err := Open("/state", durabletest.New())
		if err != nil {
			b.Fatal(err)
		}
		b.Run("save/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Save(r); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("load/"+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, _, err := s.Load(uid); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
