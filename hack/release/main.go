// Release makes the artifacts of a release, signs, pushes and verifies them:
//
//	release check -version v0.1.0
//	release build -version v0.1.0 -registry registry.example/project -out FOLDER …
//	release sign -key cosign.key FOLDER
//	release push [-to REGISTRY] FOLDER
//	release verify -key cosign.pub -version v0.1.0 FOLDER|REGISTRY
//
// The same commit gives the same digests. Check fails if the version does not fit the source. Only
// check and build need the source, only build the programs, and only sign the private key.
//
// The folder has two OCI image layouts, "image" and "chart". The image is one index for all
// platforms. The chart names it by digest. SBOMs and provenance are in-toto statements. Sign wraps
// each in a signed Sigstore bundle and attaches it as an OCI referrer, like cosign 3 does. So
// "cosign verify" and "cosign verify-attestation" read them.
//
// Release is a separate Go module, so that its dependencies do not affect the driver's.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
)

// command is one subcommand: it declares its flags, and returns what to do with them.
type command func(*flag.FlagSet) func(context.Context, []string) error

var commands = map[string]command{
	"check": checkCommand, "build": buildCommand, "sign": signCommand, "push": pushCommand, "verify": verifyCommand,
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 || commands[args[0]] == nil {
		return errors.New("want check, build, sign, push or verify, then -help for its flags")
	}
	flags := flag.NewFlagSet("release "+args[0], flag.ContinueOnError)
	do := commands[args[0]](flags)
	if err := flags.Parse(args[1:]); err != nil {
		return err
	}
	return do(ctx, flags.Args())
}

// need returns an error that names each flag that must be set and is not.
func need(flags *flag.FlagSet, names ...string) error {
	var missing []string
	for _, name := range names {
		if flags.Lookup(name).Value.String() == "" {
			missing = append(missing, "-"+name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%s needs %s", flags.Name(), strings.Join(missing, ", "))
	}
	return nil
}

// only returns the one argument.
func only(args []string, what string) (string, error) {
	if len(args) != 1 {
		return "", fmt.Errorf("want one argument, the %s; got %q", what, args)
	}
	return args[0], nil
}
