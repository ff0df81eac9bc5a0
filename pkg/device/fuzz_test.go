package device

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/version"
)

// FuzzSemver expects that Semver returns strict semver or an error for any driver version.
func FuzzSemver(f *testing.F) {
	for _, v := range []string{"580.65.06", "13.0", "", ".", "1..2", "00.00.00", "4294967296", "-1", "1.2.3.4", "١"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, v string) {
		strict, err := Semver(v)
		if err != nil {
			return
		}
		parsed, err := version.ParseSemantic(strict)
		if err != nil || parsed.String() != strict {
			t.Errorf("%q becomes %q: %v", v, strict, err)
		}
		if again, err := Semver(strict); err != nil || again != strict {
			t.Errorf("%q becomes %q, which becomes %q: %v", v, strict, again, err)
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

// FuzzParsePolicies expects that valid rules give every GPU a valid policy, and that the policy's
// text form can be parsed again.
func FuzzParsePolicies(f *testing.F) {
	for _, s := range []string{
		"", "dynamic", "0=static,*=off", "GPU-x=adopt", "=", "a=b=c", "0000:1b:00.0=off", ",,,", "*=", "99999999999999999999=off", "-1=off",
		"dynamic(1g.10gb,3g.40gb),x=off", "adopt( 1g.24gb+me.all )", "dynamic(", "dynamic()", "(=dynamic,off", "a)b(=off", "static(1g.10gb)",
	} {
		f.Add(s)
	}
	gpu := GPU{PCIAddress: "0000:1b:00.0", UUID: "GPU-x", ProductName: "NVIDIA H100"}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePolicies(s)
		if err != nil {
			return
		}
		got := p.For(gpu)
		switch got.Mode {
		case PolicyDynamic, PolicyStatic, PolicyOff, PolicyAdopt:
		default:
			t.Errorf("%q sets policy %q", s, got)
		}
		if again, err := ParsePolicies(got.String()); err != nil || again.For(gpu).String() != got.String() {
			t.Errorf("%q sets policy %q, which is parsed as %q, %v", s, got, again.For(gpu), err)
		}
	})
}
