package nodeview

import "testing"

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
