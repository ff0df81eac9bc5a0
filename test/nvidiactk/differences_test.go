package nvidiactk

import (
	"fmt"
	"regexp"
	"strings"
)

// reason explains differences between the specs of this driver and those of nvidia-ctk. The texts
// are a row of the table in docs/cdi.md.
type reason struct {
	what, ours, theirs, why string
	differences             []pattern
}

// pattern matches differences. Its strings are regular expressions for the whole text. Empty roots
// and nodes match every host.
type pattern struct {
	roots, nodes         string
	edit, field          string
	onlyOurs, onlyTheirs bool
	oursIs, theirsIs     string
	// sameFileAfterLinks says that their value leads over links on the host to ours.
	sameFileAfterLinks bool
}

const (
	drmLink = `hook createContainer create-symlinks --link \.\./(card|renderD)\d+::/dev/dri/by-path/\S+`
	// drmEdits are the device nodes, the groups without which a user cannot open them, and the links.
	drmEdits = `device node /dev/dri/(card|renderD)\d+|group (44|104)|` + drmLink
)

var reasons = []reason{
	{
		what: "permissions of device nodes", ours: "`rw`", theirs: "`rwm`",
		why: "The runtime creates the device nodes. With `m` the container may create more of the same device, " +
			"and it needs none.",
		differences: []pattern{{edit: `device node .*`, field: `permissions`, oursIs: `rw`, theirsIs: `rwm`}},
	},
	{
		what: "number and mode of device nodes", ours: "none", theirs: "those of the moment",
		why: "The runtime reads them from the host's device node when the container starts. The number of " +
			"`nvidia-uvm` changes with every load of its module, so a stored one may be another device's.",
		differences: []pattern{
			{edit: `device node /dev/(nvidia[^/]+|dri/.*)`, field: `major|minor`, theirsIs: `\d+`},
			{edit: `device node /dev/(nvidia[^/]+|dri/.*)`, field: `fileMode`, theirsIs: `-rw-rw-(rw-|---)`},
		},
	},
	{
		what: "device nodes of MIG devices", ours: "type, number and mode", theirs: "number, mode and path on the host",
		why: "The same device. With the type, a runtime needs no device node on the host. The number stays until " +
			"the driver is loaded again, which removes the MIG device.",
		differences: []pattern{
			{edit: `device node /dev/nvidia-caps/nvidia-cap\d+`, field: `type`, oursIs: `c`},
			{
				roots: `driver-container`, edit: `device node /dev/nvidia-caps/nvidia-cap\d+`, field: `hostPath`,
				oursIs: `/dev/nvidia-caps/.*`, theirsIs: `/run/nvidia/driver/dev/nvidia-caps/.*`,
			},
		},
	},
	{
		what: "device nodes of MIG devices that the host lacks", ours: "type, number and mode", theirs: "none",
		why: "Without nvidia-modprobe the host has none, and the container could not use its MIG device (mig-parted#82).",
		differences: []pattern{
			{nodes: `no-capability-nodes`, edit: `device nvidia-cap\d+ nvidia-cap\d+ nvidia0`, onlyOurs: true},
			{nodes: `no-capability-nodes`, edit: `device nvidia0`, onlyTheirs: true},
		},
	},
	{
		what: "device nodes of `/dev/dri` for partitions with graphics", ours: "none", theirs: "all of the GPU",
		why: "Since driver 575.51 each belongs to one MIG device with graphics (open kernel modules, " +
			"`nvidia-drm-drv.c`). No file says to which, so a container could get those of other users.",
		differences: []pattern{{nodes: `graphics-mig`, edit: drmEdits, onlyTheirs: true}},
	},
	{
		what: "device nodes of `/dev/dri` with a driver container", ours: "from the host's `/dev`", theirs: "none",
		why: "The kernel makes them in the host's `/dev`. nvidia-ctk looks in the `/dev` of the driver root only.",
		differences: []pattern{
			{roots: `driver-container`, edit: drmEdits, onlyOurs: true},
		},
	},
	{
		what: "environment of the hook that links in `/dev/dri`", ours: "none", theirs: "`NVIDIA_CTK_DEBUG=false`",
		why:         "That is the hook's default.",
		differences: []pattern{{edit: drmLink, field: `env`, theirsIs: `NVIDIA_CTK_DEBUG=false`}},
	},
	{
		what: "hook `apply-cuda-memory-limits`", ours: "no", theirs: "yes",
		why: "It fails on cgroup v1 and with an older driver as soon as a container sets `NVIDIA_GPU_MEMORY_LIMIT`. " +
			"Limits of this driver have a hook of their own.",
		differences: []pattern{{edit: `hook createRuntime apply-cuda-memory-limits.*`, onlyTheirs: true}},
	},
	{
		what: "sockets of `nvidia-persistenced` and the fabric manager", ours: "no", theirs: "yes",
		why:         "A container could command daemons of the host, which serve all GPUs.",
		differences: []pattern{{edit: `mount (/var)?/run/nvidia-(persistenced|fabricmanager)/socket`, onlyTheirs: true}},
	},
	{
		what: "mount of `/dev/null` at `/var/run/nvidia-container-devices/void`", ours: "no", theirs: "yes",
		why: "It keeps NVIDIA's own runtime from adding GPUs. `NVIDIA_VISIBLE_DEVICES=void`, which both set, does that.",
		differences: []pattern{
			{edit: `mount /var/run/nvidia-container-devices/void`, onlyTheirs: true},
		},
	},
	{
		what: "source of a mount behind links", ours: "the file", theirs: "a path over links",
		why: "The same file, as the test checks. The runtime follows links in the host's root, where one of " +
			"the driver root may lead to another file.",
		differences: []pattern{{edit: `mount .*`, field: `hostPath`, sameFileAfterLinks: true}},
	},
	{
		what: "programs outside `/usr/bin`, `/usr/local/bin` and `/bin`", ours: "at `/usr/bin`", theirs: "none",
		why: "Bottlerocket, Flatcar and NixOS have them elsewhere. nvidia-smi and MPS should work there, too.",
		differences: []pattern{
			{roots: `bottlerocket`, edit: `mount /usr/bin/nvidia-smi`, onlyOurs: true},
			{roots: `flatcar|nixos`, edit: `mount /usr/bin/nvidia-(smi|cuda-mps-control|cuda-mps-server)`, onlyOurs: true},
		},
	},
}

// explains reports whether the pattern matches a difference on the host. leadsTo resolves the links
// of a path on it.
func (p pattern) explains(root, node string, d difference, leadsTo func(string) string) bool {
	if p.sameFileAfterLinks && leadsTo(d.theirs) != d.ours {
		return false
	}
	for value, want := range map[string]string{root: p.roots, node: p.nodes} {
		if want != "" && !matches(want, value) {
			return false
		}
	}
	switch {
	case !matches(p.edit, d.edit) || !matches(p.field, d.field):
		return false
	case p.onlyOurs:
		return d.theirs == none
	case p.onlyTheirs:
		return d.ours == none
	}
	return p.sameFileAfterLinks || matches(p.oursIs, d.ours) && matches(p.theirsIs, d.theirs)
}

func matches(whole, text string) bool {
	return regexp.MustCompile(`^(` + whole + `)$`).MatchString(text)
}

// table is the section of docs/cdi.md.
func table() string {
	var out strings.Builder
	out.WriteString("| what | this driver | `nvidia-ctk cdi generate` | why |\n|---|---|---|---|\n")
	for _, r := range reasons {
		fmt.Fprintf(&out, "| %s | %s | %s | %s |\n", r.what, r.ours, r.theirs, r.why)
	}
	return out.String()
}
