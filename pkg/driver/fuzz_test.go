package driver

import (
	"os"
	"testing"
	"time"
)

// Whatever a container runtime says of its configuration, its directories are known by either name.
func FuzzRuntimeConfig(f *testing.F) {
	for _, config := range []string{`{"enableCDI":false}`, `{"cdiSpecDirs":["/run/cdi"]}`, `{"cdiSpecDirs":[]}`, `{"cdiSpecDirs":["..","/var/run/../run/cdi"]}`, ``, `{`, `[]`, `{"enableCDI":null,"cdiSpecDirs":[null]}`} {
		f.Add(config)
	}
	f.Fuzz(func(t *testing.T, config string) {
		one, _ := refusesCDI(config, "/var/run/cdi")
		other, _ := refusesCDI(config, "/run/cdi")
		if one != other {
			t.Errorf("%q: the two names of a directory are told apart", config)
		}
	})
}

// Whatever stands where an instance asks for its turn to publish, it is a time at which one started, or nobody asks.
func FuzzTurnRequest(f *testing.F) {
	for _, text := range []string{"1700000000000000000", "", "-1", "1e9", "99999999999999999999", " 1\n"} {
		f.Add([]byte(text))
	}
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, text []byte) {
		turn := newTurn(dir, time.Unix(1, 0))
		if err := os.WriteFile(turn.request, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if at := turn.requested(); !at.IsZero() && !time.Unix(0, at.UnixNano()).Equal(at) {
			t.Errorf("%q is %v", text, at)
		}
	})
}
