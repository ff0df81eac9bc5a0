package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpu-dra-driver/gpu-dra-driver/test/cluster"
)

// upFlags are the flags that describe a new cluster. All its nodes are alike, except that CDI can
// be off on some of them. Other differences between nodes need the Go API.
type upFlags struct {
	base   cluster.Options // the versions, and the release's own defaults
	nodes  int
	hook   string
	noCDI  []string
	gates  map[string]string
	images []string
	mounts []string
}

func upCommand(name *string) *cobra.Command {
	var flags upFlags
	command := &cobra.Command{
		Use:   "up",
		Short: "Build what is missing, and bring a new cluster up",
		Args:  cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			options, err := flags.options(*name)
			if err != nil {
				return err
			}
			options.Output = command.ErrOrStderr()
			_, err = cluster.Up(command.Context(), options)
			return err
		},
	}
	set := command.Flags()
	set.IntVar(&flags.nodes, "nodes", 1, "number of nodes that run Pods, named node1, node2, …")
	addVersionFlags(command, &flags.base)
	set.BoolVar(&flags.base.ReleaseDefaults, "release-defaults", false, "leave feature gates and APIs as the Kubernetes release has them")
	set.StringVar(
		&flags.hook,
		"boot-hook",
		"",
		"command `'PROGRAM ARG …'` that every node runs at each boot, before containerd; NODE_NAME is set",
	)
	set.StringSliceVar(&flags.noCDI, "no-cdi", nil, "`nodes` whose containerd ignores CDI devices")
	set.StringToStringVar(&flags.gates, "feature-gates", nil, "feature gates of all components, over the defaults: `NAME=true,…`")
	set.StringArrayVar(&flags.images, "image", nil, "image `archive` to load on every node; may be repeated")
	set.StringArrayVar(&flags.mounts, "mount", nil, "`SOURCE[:TARGET][:rw]` of this host to show on every node; may be repeated")
	return command
}

func (f upFlags) options(name string) (cluster.Options, error) {
	options := f.base
	options.Name, options.Images, options.FeatureGates = name, f.images, map[string]bool{}
	for gate, value := range f.gates {
		on, err := strconv.ParseBool(value)
		if err != nil {
			return options, fmt.Errorf("feature gate %s=%s: want true or false", gate, value)
		}
		options.FeatureGates[gate] = on
	}
	var mounts []cluster.Mount
	for _, text := range f.mounts {
		mount, err := parseMount(text)
		if err != nil {
			return options, err
		}
		mounts = append(mounts, mount)
	}
	unknown := slices.Clone(f.noCDI)
	for i := range max(f.nodes, 1) {
		node := cluster.NodeOptions{Name: fmt.Sprintf("node%d", i+1), BootHook: strings.Fields(f.hook), Mounts: mounts}
		node.DisableCDI = slices.Contains(f.noCDI, node.Name)
		unknown = slices.DeleteFunc(unknown, func(other string) bool { return other == node.Name })
		options.Nodes = append(options.Nodes, node)
	}
	if len(unknown) > 0 {
		return options, fmt.Errorf("--no-cdi names nodes that the cluster will not have: %s", strings.Join(unknown, ", "))
	}
	return options, nil
}

func parseMount(text string) (cluster.Mount, error) {
	parts := strings.Split(text, ":")
	mount := cluster.Mount{Source: parts[0]}
	for _, part := range parts[1:] {
		switch {
		case part == "rw":
			mount.Writable = true
		case part == "ro":
		case filepath.IsAbs(part) && mount.Target == "":
			mount.Target = part
		default:
			return mount, fmt.Errorf("mount %q: want SOURCE[:TARGET][:ro|:rw] with absolute paths", text)
		}
	}
	return mount, nil
}
