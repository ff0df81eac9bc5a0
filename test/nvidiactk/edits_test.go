package nvidiactk

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"tags.cncf.io/container-device-interface/specs-go"
)

// edit is one thing that a spec does to a container, by its name, with the values of its fields.
type edit map[string]string

// edits are the edits of a container by their names, such as "mount /usr/bin/nvidia-smi".
type edits map[string]edit

// editsOf returns all that the specs' parts do to a container. A hook is an edit for each of its
// flags, since it may take a list, such as the links to create.
func editsOf(parts ...specs.ContainerEdits) edits {
	found := edits{}
	for _, p := range parts {
		for _, v := range p.Env {
			name, value, _ := strings.Cut(v, "=")
			found["env "+name] = edit{"value": value}
		}
		for _, n := range p.DeviceNodes {
			found["device node "+n.Path] = edit{
				"hostPath": cmp.Or(n.HostPath, n.Path), "type": n.Type, "major": number(n.Major), "minor": number(n.Minor),
				"fileMode": text(n.FileMode), "permissions": n.Permissions, "uid": text(n.UID), "gid": text(n.GID),
			}
		}
		for _, m := range p.Mounts {
			options := slices.Sorted(slices.Values(m.Options))
			found["mount "+m.ContainerPath] = edit{"hostPath": m.HostPath, "type": m.Type, "options": strings.Join(options, ",")}
		}
		for _, h := range p.Hooks {
			found.addHook(h)
		}
		for _, gid := range p.AdditionalGIDs {
			found[fmt.Sprintf("group %d", gid)] = edit{}
		}
		for _, d := range p.NetDevices {
			found["network device "+d.HostInterfaceName] = edit{"name": d.Name}
		}
		if p.IntelRdt != nil {
			found["intelRdt"] = edit{}
		}
	}
	return found
}

// addHook adds the hook, once for each of its flags.
func (e edits) addHook(h *specs.Hook) {
	call := "hook " + h.HookName
	var flags []string
	for i := 1; i < len(h.Args); i++ {
		if flag := h.Args[i]; strings.HasPrefix(flag, "--") && !strings.Contains(flag, "=") && i+1 < len(h.Args) {
			i++
			flags = append(flags, flag+" "+h.Args[i])
		} else if strings.HasPrefix(flag, "--") {
			flags = append(flags, strings.Replace(flag, "=", " ", 1))
		} else {
			call += " " + flag
		}
	}
	timeout := ""
	if h.Timeout != nil {
		timeout = strconv.Itoa(*h.Timeout)
	}
	if len(flags) == 0 {
		flags = []string{""}
	}
	for _, flag := range flags {
		e[strings.TrimSpace(call+" "+flag)] = edit{
			"path": h.Path, "name": path.Base(h.Args[0]), "env": strings.Join(slices.Sorted(slices.Values(h.Env)), " "), "timeout": timeout,
		}
	}
}

func number(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

func text[T any](value *T) string {
	if value == nil {
		return ""
	}
	return fmt.Sprint(*value)
}

// identity is what makes a device of both specs the same one: the device nodes that only the GPU
// and its MIG device have.
func identity(e specs.ContainerEdits) string {
	var own []string
	for _, n := range e.DeviceNodes {
		if strings.HasPrefix(n.Path, "/dev/nvidia") {
			own = append(own, path.Base(n.Path))
		}
	}
	slices.Sort(own)
	return strings.Join(own, " ")
}

// difference is an edit that only one of the specs has (then field is empty), or a field of an edit
// with two values.
type difference struct {
	edit, field, ours, theirs string
}

const (
	there = "yes"
	none  = "–"
)

func (d difference) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s: ours %q, theirs %q", d.edit, d.field, d.ours, d.theirs))
}

func compare(ours, theirs edits) (found []difference) {
	all := maps.Clone(ours)
	maps.Copy(all, theirs)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		mine, isOurs := ours[name]
		other, isTheirs := theirs[name]
		switch {
		case !isTheirs:
			found = append(found, difference{name, "", there, none})
		case !isOurs:
			found = append(found, difference{name, "", none, there})
		default:
			for _, field := range slices.Sorted(maps.Keys(mine)) {
				if mine[field] != other[field] {
					found = append(found, difference{name, field, mine[field], other[field]})
				}
			}
		}
	}
	return found
}
