package driver

import (
	"os"
	"testing"
	"time"
)

// The paths /run/cdi and /var/run/cdi name the same directory, so refusesCDI must return the same
// code for both, for any configuration of the container runtime.
func FuzzRuntimeConfig(f *testing.F) {
	for _, config := range []string{
		`{"enableCDI":false}`, `{"cdiSpecDirs":["/run/cdi"]}`, `{"cdiSpecDirs":[]}`,
		`{"cdiSpecDirs":["..","/var/run/../run/cdi"]}`, ``, `{`, `[]`, `{"enableCDI":null,"cdiSpecDirs":[null]}`,
	} {
		f.Add(config)
	}
	f.Fuzz(func(t *testing.T, config string) {
		one, _ := refusesCDI(config, "/var/run/cdi")
		other, _ := refusesCDI(config, "/run/cdi")
		if one != other {
			t.Errorf("%q: the two names of a directory give different results", config)
		}
	})
}

// Whatever the request file contains, the leader must read it either as a start time of another
// plugin instance or as no request, and must not panic.
func FuzzHandoverRequest(f *testing.F) {
	for _, text := range []string{"1700000000000000000", "", "-1", "1e9", "99999999999999999999", " 1\n"} {
		f.Add([]byte(text))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		leader := newLeaderLock(dir, time.Unix(1, 0))
		if err := os.WriteFile(leader.requestPath, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if at := leader.requestTime(); !at.IsZero() && !time.Unix(0, at.UnixNano()).Equal(at) {
			t.Errorf("%q is %v", text, at)
		}
	})
}
