#include "cli/commands.h"

int main(int argc, char** argv) { return plumb::cli::run(argc, argv); }
