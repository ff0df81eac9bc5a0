package nodeview

import (
	"context"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestRefusesCDI(t *testing.T) {
	for name, c := range map[string]struct {
		config string
		want   string // a part of the message, or "" if the runtime reads the CDI specs
	}{
		"containerd 1.7 as shipped":             {`{"enableCDI":false,"cdiSpecDirs":["/etc/cdi","/var/run/cdi"]}`, "enable_cdi = true"},
		"switched on":                           {`{"enableCDI":true,"cdiSpecDirs":["/etc/cdi","/var/run/cdi"]}`, ""},
		"a release that always has it on":       {`{"cdiSpecDirs":["/etc/cdi","/var/run/cdi"]}`, ""},
		"the same directory by its other name":  {`{"enableCDI":true,"cdiSpecDirs":["/run/cdi/"]}`, ""},
		"other directories":                     {`{"enableCDI":true,"cdiSpecDirs":["/etc/cdi"]}`, "cdi_spec_dirs"},
		"no directory at all":                   {`{"enableCDI":true,"cdiSpecDirs":[]}`, "cdi_spec_dirs"},
		"a runtime that does not say":           {`{}`, ""},
		"a runtime without a configuration":     {``, ""},
		"a configuration of another form":       {`[]`, ""},
		"a value of another type than expected": {`{"enableCDI":"no"}`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			code, got := refusesCDI(c.config, "/var/run/cdi")
			if (c.want == "") != (got == "") || (code == "") != (got == "") || !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q in it", got, c.want)
			}
		})
	}
}

type fakeRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	config string
}

func (f *fakeRuntime) Status(_ context.Context, r *runtimeapi.StatusRequest) (*runtimeapi.StatusResponse, error) {
	answer := &runtimeapi.StatusResponse{}
	if r.GetVerbose() {
		answer.Info = map[string]string{"config": f.config}
	}
	return answer, nil
}

func TestRuntimeRefusesCDIOverSocket(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "cri.sock")
	if _, _, err := runtimeRefusesCDI(t.Context(), socket, "/var/run/cdi"); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("without a runtime: %v", err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, &fakeRuntime{config: `{"enableCDI":false}`})
	go func() { _ = server.Serve(l) }()
	defer server.Stop()
	code, reason, err := runtimeRefusesCDI(t.Context(), socket, "/var/run/cdi")
	if err != nil || code != CodeCDIDisabled || reason == "" {
		t.Errorf("code %q, reason %q, error %v", code, reason, err)
	}
}
