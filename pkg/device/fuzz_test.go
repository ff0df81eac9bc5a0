package device

import (
	"testing"

	utilversion "k8s.io/apimachinery/pkg/util/version"
)

// FuzzVersion expects that version returns strict semver for any driver version.
func FuzzVersion(f *testing.F) {
	for _, v := range []string{"580.65.06", "13.0", "", ".", "1..2", "00.00.00", "4294967296", "-1", "1.2.3.4", "١"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v string) {
		strict := *version(v).VersionValue
		parsed, err := utilversion.ParseSemantic(strict)
		if err != nil || parsed.String() != strict {
			t.Errorf("%q becomes %q: %v", v, strict, err)
		}
		if again := *version(strict).VersionValue; again != strict {
			t.Errorf("%q becomes %q, which becomes %q", v, strict, again)
		}
	})
}

// FuzzParsePCIAddress expects that parsing a parsed address again returns the same address, and
// that ParseName accepts the device name made from the address.
func FuzzParsePCIAddress(f *testing.F) {
	for _, s := range []string{"00000000:1B:00.0", "0000:1b:00.0", "10000:e1:00.7", "", "0000:1b:00.8", "FFFFFFFF:ff:ff.7", "K:1b:00.0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := ParsePCIAddress(s)
		if err != nil {
			return
		}
		if again, err := ParsePCIAddress(string(a)); err != nil || again != a {
			t.Errorf("%q becomes %q, which becomes %q: %v", s, a, again, err)
		}
		name, ok := ParseName(a.WholeName())
		if !ok || name.PCIAddress() != a || name.GPU != a.WholeName() || name.Partition != nil || name.Share {
			t.Errorf("%q is named %q, which is parsed as %+v, %v", s, a.WholeName(), name, ok)
		}
	})
}
