package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// environment replaces the environment of the process.
type environment map[string]string

func (e environment) lookup(name string) (string, bool) {
	value, ok := e[name]
	return value, ok
}

func TestLaterSourcesWin(t *testing.T) {
	file := write(t, "driverRoot: /from/file\ncdiRoot: /from/file\nhttpAddress: ':1'\nkubeApiQps: 12.5\nmps: true\n")
	c, err := Load("test", []string{"--config", file, "--http-address=:3"},
		environment{"GPU_DRA_CDI_ROOT": "/from/env", "GPU_DRA_HTTP_ADDRESS": ":2", "OTHER": "x"}.lookup, nil)
	if err != nil {
		t.Fatal(err)
	}
	got := []string{c.DriverRoot, c.CDIRoot, c.HTTPAddress, c.ProcRoot}
	want := []string{"/from/file", "/from/env", ":3", "/proc"}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("got %q, want %q", got, want)
			break
		}
	}
	if c.KubeAPIQPS != 12.5 {
		t.Errorf("kubeApiQps from the file: got %v", c.KubeAPIQPS)
	}
	if !c.MPS || Default().MPS {
		t.Errorf("mps from the file: got %t, the default is %t", c.MPS, Default().MPS)
	}
}

func TestDerivedValues(t *testing.T) {
	c, err := Load("test", []string{"--driver-root=/run/nvidia/driver", "--plugin-dir=/k0s/plugins/gpu.nvidia.com"}, environment{}.lookup, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.DriverRootMount != "/run/nvidia/driver" {
		t.Errorf("driver root as mounted: %q", c.DriverRootMount)
	}
	if diff := cmp.Diff(append(slices.Clone(OwnHookDirs), "/k0s/plugins/gpu.nvidia.com/bin"), c.HookDirs); diff != "" {
		t.Error("directories of the hooks:", diff)
	}
	if c.StateDir() != "/k0s/plugins/gpu.nvidia.com/state" {
		t.Errorf("state directory: %q", c.StateDir())
	}
	c, err = Load("test", []string{"--hook-path=/opt/bin/nvidia-cdi-hook"}, environment{}.lookup, nil)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"/opt/bin"}, c.HookDirs); diff != "" {
		t.Error("directories of the hooks:", diff)
	}
}

func TestEverySourceIsStrict(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		args []string
		env  environment
		want []string
	}{
		"unknown key":          {file: "driverRoots: /x", want: []string{"config.yaml", `unknown key "driverRoots"`}},
		"key given twice":      {file: "cdiRoot: /a\ncdiRoot: /b", want: []string{"config.yaml", "cdiRoot"}},
		"not YAML":             {file: "{", want: []string{"config.yaml"}},
		"a list for a value":   {file: "cdiRoot: [/a]", want: []string{"cdiRoot", "single value"}},
		"a word for a Boolean": {file: "mps: perhaps", want: []string{"mps"}},
		"a word for a number":  {file: "kubeApiBurst: many", want: []string{"kubeApiBurst"}},
		"a bad variable":       {env: environment{"GPU_DRA_KUBE_API_BURST": "many"}, want: []string{"GPU_DRA_KUBE_API_BURST"}},
		"a bad flag":           {args: []string{"--kube-api-burst=many"}, want: []string{"--kube-api-burst"}},
		"an unknown flag":      {args: []string{"--no-such"}, want: []string{"no-such"}},
		"an argument":          {args: []string{"more"}, want: []string{`"more"`}},
		"a missing file":       {args: []string{"--config=/nowhere/x.yaml"}, want: []string{"/nowhere/x.yaml"}},
		"a relative path":      {args: []string{"--cdi-root=cdi"}, want: []string{"--cdi-root", `"cdi"`}},
		"a hook below /":       {args: []string{"--hook-path=/nvidia-cdi-hook"}, want: []string{"--hook-path", "below /"}},
		"a directory at /":     {args: []string{"--plugin-dir=/"}, want: []string{"--plugin-dir", "below /"}},
		"no directory":         {args: []string{"--plugin-dir="}, want: []string{"--plugin-dir", "absolute path"}},
		"no path":              {args: []string{"--cdi-root="}, want: []string{"--cdi-root", `""`}},
		"a relative socket":    {args: []string{"--cri-socket=x.sock"}, want: []string{"--cri-socket"}},
		"a bad node name":      {args: []string{"--node-name=No_Node"}, want: []string{"--node-name", "No_Node"}},
		"a bad address":        {args: []string{"--http-address=8080"}, want: []string{"--http-address", "8080"}},
		"no settings there":    {args: []string{"--settings=/nowhere/x.yaml"}, want: []string{"--settings", "/nowhere/x.yaml"}},
		"bad settings": {
			args: []string{"--settings=" + write(t, "mig: {}\nshare: []")}, want: []string{"--settings", "line 2", `unknown field "share"`},
		},
		"no requests a second":  {args: []string{"--kube-api-qps=0"}, want: []string{"--kube-api-qps"}},
		"no number of requests": {args: []string{"--kube-api-qps=nan"}, want: []string{"--kube-api-qps"}},
		"no burst":              {args: []string{"--kube-api-burst=0"}, want: []string{"--kube-api-burst"}},
		"too verbose":           {args: []string{"--v=11"}, want: []string{"--v"}},
		"an unknown log format": {args: []string{"--logging-format=xml"}, want: []string{"--logging-format", "xml"}},
		"all of it at once":     {args: []string{"--cdi-root=cdi", "--v=11"}, want: []string{"--cdi-root", "--v"}},
	} {
		t.Run(name, func(t *testing.T) {
			args := c.args
			if c.file != "" {
				args = append(args, "--config", write(t, c.file))
			}
			_, err := Load("test", args, c.env.lookup, nil)
			if err == nil {
				t.Fatal("accepted")
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("error %q does not name %q", err, w)
				}
			}
		})
	}
}

func TestRequireNodeNeedsNodeName(t *testing.T) {
	c := Default()
	if err := c.RequireNode(); err == nil || !strings.Contains(err.Error(), "--node-name") {
		t.Errorf("without a node name: %v", err)
	}
	c.NodeName = "a"
	if err := c.RequireNode(); err != nil {
		t.Error(err)
	}
}

func TestFieldEnvAndKey(t *testing.T) {
	f := Field{Name: "kube-api-qps"}
	if f.Env() != "GPU_DRA_KUBE_API_QPS" || f.Key() != "kubeApiQps" {
		t.Errorf("%s, %s", f.Env(), f.Key())
	}
}
