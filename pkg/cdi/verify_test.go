package cdi

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"
)

func TestVerifyNamesFirstMissingFile(t *testing.T) {
	root := t.TempDir()
	for path, mode := range map[string]os.FileMode{"lib": 0o644, "hook": 0o755, "no-hook": 0o644, "everyones-hook": 0o755} {
		must(t, os.WriteFile(filepath.Join(root, path), nil, mode))
	}
	must(t, os.Chmod(filepath.Join(root, "hook"), 0o755))
	must(t, os.Chmod(filepath.Join(root, "everyones-hook"), 0o777))
	must(t, os.Symlink("hook", filepath.Join(root, "link-to-a-hook")))
	visible := func(host string) string {
		if strings.HasPrefix(host, "/dev/") {
			return host
		}
		return filepath.Join(root, host)
	}
	node := func(n specs.DeviceNode) specs.ContainerEdits {
		return specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{&n}}
	}
	hook := func(path string) specs.ContainerEdits {
		return specs.ContainerEdits{Hooks: []*specs.Hook{{HookName: "createContainer", Path: path}}}
	}
	for _, tc := range []struct {
		name  string
		edits specs.ContainerEdits
		says  string
	}{
		{"nothing to verify", specs.ContainerEdits{Env: []string{"A=b"}}, ""},
		{"node", node(specs.DeviceNode{Path: "/dev/null"}), ""},
		{"node by its number", node(specs.DeviceNode{Path: "/dev/nowhere", Type: "c", Major: 1, Minor: 3}), ""},
		{"missing node", node(specs.DeviceNode{Path: "/dev/null", HostPath: "/dev/nvidia99"}), "device node /dev/nvidia99 is missing"},
		{"a file for a node", node(specs.DeviceNode{Path: "/lib"}), "is not a character device"},
		{"mount", specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/lib"}}}, ""},
		{"missing mount source", specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/lib"}, {HostPath: "/gone"}}},
			"mount source /gone is missing"},
		{"hook", hook("/hook"), ""},
		{"missing hook", hook("/gone"), "hook /gone is missing"},
		{"hook that cannot run", hook("/no-hook"), "is not an executable file"},
		{"hook that others can change", hook("/everyones-hook"), "others may write"},
		{"hook that is a link", hook("/link-to-a-hook"), "symbolic link"},
		{"hook that is a directory", hook("/"), "is not an executable file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			err := Mapper(visible).Verify(tc.edits)
			if tc.says == "" {
				must(t, err)
			} else if err == nil || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("error is %v, want one that says %q", err, tc.says)
			}
		})
	}
}
